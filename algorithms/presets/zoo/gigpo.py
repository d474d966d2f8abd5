"""GiGPO and HGPO: calls compared with those made in the same state."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor

from agentrl.algorithms.credit.core import Column, GroupRelative, standardise, weighted_sum
from agentrl.algorithms.credit.turns import Returns
from agentrl.algorithms.data.batch import Batch
from agentrl.algorithms.data.ids import key, next_same, previous, units
from agentrl.algorithms.objective.core import Algo
from agentrl.algorithms.presets.registry import (
    PPO_CLIP,
    Discount,
    Num,
    Scale,
    Share,
    modifier,
    outcome_of,
    preset,
)
from agentrl.config import Natural


@dataclass(frozen=True, slots=True)
class SameStateRelative:
    """[N] HGPO, arXiv 2602.22817: calls compared with those in the same state after the same k
    states before, for k = 0 .. depth; mean of the levels that teach something, weighted
    (k + 1) ** alpha. depth 0 is the step credit of GiGPO (arXiv 2505.10978)."""

    reward: str | Column = "outcome"
    gamma: float = 0.95
    depth: int = 0
    alpha: float = 1.0
    norm: Literal["none", "std"] = "none"

    def __call__(self, batch: Batch) -> Tensor:
        x = Returns(self.reward, self.gamma)(batch)
        before = previous(next_same(batch.transition_rollout))
        state = units(batch, "transition", "state")
        ids, back = units(batch, "transition", "group", "state"), before
        total, share = torch.zeros_like(x), torch.zeros_like(x)
        for k in range(self.depth + 1):
            advantage = standardise(x, ids, norm=self.norm).advantage
            weight = (k + 1) ** self.alpha * (advantage != 0)
            total, share = total + weight * advantage, share + weight
            ids = key(ids, torch.where(back >= 0, state[back], -1))
            back = torch.where(back >= 0, before[back], -1)
        advantage = torch.where(share > 0, total / share, 0.0)
        return torch.where(x.isnan(), torch.nan, advantage)[batch.token_transition]


@preset("gigpo", clip=PPO_CLIP, kl=True)
def gigpo(
    reward: str, *, weight: Share = 1.0, gamma: Discount = 0.95, norm: Scale = "none"
) -> Algo:
    """Rollouts compared within the task, plus calls compared with those in the same state. arXiv
    2505.10978."""
    anchors = SameStateRelative(reward, gamma, norm=norm)
    credit = weighted_sum((GroupRelative(reward, norm=norm), 1.0), (anchors, weight))
    return Algo(credit)


@modifier("gigpo")
def with_gigpo(
    algo: Algo,
    *,
    gigpo_weight: Share = 1.0,
    gigpo_gamma: Discount = 0.95,
    gigpo_norm: Scale = "none",
) -> Algo:
    """Adds the comparison with calls in the same state. arXiv 2505.10978."""
    anchors = SameStateRelative(outcome_of(algo), gigpo_gamma, norm=gigpo_norm)
    return replace(algo, credit=weighted_sum((algo.credit, 1.0), (anchors, gigpo_weight)))


@preset("hgpo", clip=PPO_CLIP, kl=True)
def hgpo(
    reward: str,
    *,
    gamma: Discount = 0.95,
    depth: Natural = 2,
    alpha: Num = 1.0,
    norm: Scale = "none",
) -> Algo:
    """Calls compared with those in the same state after the same states before, longer histories
    weighing more. arXiv 2602.22817."""
    credit = SameStateRelative(reward, gamma, depth, alpha, norm)
    return Algo(credit)


@modifier("hgpo")
def with_hgpo(
    algo: Algo,
    *,
    hgpo_gamma: Discount = 0.95,
    hgpo_depth: Natural = 2,
    hgpo_alpha: Num = 1.0,
    hgpo_norm: Scale = "none",
) -> Algo:
    """Puts HGPO's credit in the place of the host's. arXiv 2602.22817."""
    credit = SameStateRelative(outcome_of(algo), hgpo_gamma, hgpo_depth, hgpo_alpha, hgpo_norm)
    return replace(algo, credit=credit)
