"""Credit of single calls without a critic, from calls in the same state: GiGPO, peer values."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor

from agentrl.algorithms.credit import core, turns
from agentrl.algorithms.credit.core import Column, GroupRelative, weighted_sum
from agentrl.algorithms.credit.peers import LAMBDA, PeerAdvantages
from agentrl.algorithms.credit.scale import GrpoScale, ReturnScale
from agentrl.algorithms.data.batch import Batch
from agentrl.algorithms.data.ids import key, next_same, previous, units
from agentrl.algorithms.objective.core import Algo
from agentrl.algorithms.presets import declare
from agentrl.algorithms.presets.declare import PPO_CLIP, Discount, Scale, Share, modifier, preset


@dataclass(frozen=True, slots=True)
class SameStateRelative:
    """HGPO, arXiv 2602.22817: calls compared with those in the same state and with the same k
    previous states, for k = 0 .. depth; mean over the k with an advantage other than 0, weighted
    by (k + 1) ** alpha, [N]. depth 0 is the step credit of GiGPO (arXiv 2505.10978)."""

    reward: str | Column = "outcome"
    gamma: float = 0.95
    depth: int = 0
    alpha: float = 1.0
    norm: Literal["none", "std"] = "none"

    def __call__(self, batch: Batch) -> Tensor:
        x = turns.Returns(self.reward, self.gamma)(batch)
        before = previous(next_same(batch.transition_rollout))
        state = units(batch, "transition", "state")
        same, back = units(batch, "transition", "group", "state"), before
        total, weights = torch.zeros_like(x), torch.zeros_like(x)
        for k in range(self.depth + 1):
            advantage = core.standardise(x, same, norm=self.norm).advantage
            weight = (k + 1) ** self.alpha * (advantage != 0)
            total, weights = total + weight * advantage, weights + weight
            same = key(same, torch.where(back >= 0, state[back], -1))
            back = torch.where(back >= 0, before[back], -1)
        advantage = torch.where(weights > 0, total / weights, 0.0)
        return torch.where(x.isnan(), torch.nan, advantage)[batch.token_transition]


@modifier("gigpo", prefix="gigpo_")
def with_gigpo(
    algo: Algo, *, weight: Share = 1.0, gamma: Discount = 0.95, norm: Scale = "none"
) -> Algo:
    """Adds a comparison with calls in the same state. arXiv 2505.10978."""
    anchors = SameStateRelative(declare.outcome_of(algo), gamma, norm=norm)
    return replace(algo, credit=weighted_sum((algo.credit, 1.0), (anchors, weight)))


@preset("gigpo", clip=PPO_CLIP, kl=True)
def gigpo(
    reward: str, *, weight: Share = 1.0, gamma: Discount = 0.95, norm: Scale = "none"
) -> Algo:
    """Rollouts compared within the task, plus calls compared with those in the same state. arXiv
    2505.10978. The discount makes credit depend on constants: with rewards of -9 and -10 in place
    of 1 and 0 the error of a gradient rose from 0.97 to 1.2 times that of `rloo`."""
    host = Algo(GroupRelative(reward, norm=norm))
    return with_gigpo(host, weight=weight, gamma=gamma, norm=norm)


@declare.as_modifier("peers", prefix="peers_")
@preset("peers", clip=PPO_CLIP, kl=True)
def peers(reward: str, *, gamma: Discount = 1.0, lam: Discount = LAMBDA) -> Algo:
    """Compares each call with other rollouts that came to the same state, as far as this batch and
    those before show that states tell what calls did; without such states it is `rloo`. Needs no
    critic. GAE over calls as in arXiv 2511.14460, states as in 2505.10978."""
    return Algo(GroupRelative(PeerAdvantages(reward, gamma, lam), base="none"))


@preset("auto", clip=(0.2, 0.2, math.inf), kl=True)
def auto(reward: str, *, std: bool = True, gamma: Discount = 1.0, lam: Discount = LAMBDA) -> Algo:
    """`grpo`, with the credit of `peers` where states recur and tell what earlier calls did; on the
    scale of `grpo`, with or without `std`, which is that of the batches before, too. arXiv
    2402.03300."""
    credit = peers(reward=reward, gamma=gamma, lam=lam).credit
    return Algo(GrpoScale(credit, reward, ReturnScale(reward)) if std else credit)
