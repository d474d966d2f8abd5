"""Rewards of calls beside the outcome: PRIME, iStar, ArCHer and MT-GRPO."""

from __future__ import annotations

import torch
from torch import Tensor

from agentrl.algorithms.credit import core
from agentrl.algorithms.credit.core import Column, Credit, GroupRelative, column, weighted_sum
from agentrl.algorithms.credit.turns import call_rewards
from agentrl.algorithms.data.batch import Batch
from agentrl.algorithms.data.ids import reduce_by
from agentrl.algorithms.objective.core import ROW_SUMS, TOKENS, Algo
from agentrl.algorithms.presets.mixing import RewardStream, stream_advantage
from agentrl.algorithms.presets.registry import PPO_CLIP, Share, preset
from agentrl.types import Scope


@column()
def OutcomePlusCalls(batch: Batch, reward: str | Column, calls: str, weight: float = 1.0) -> Tensor:
    """[U] the reward of a rollout plus `weight` times what its calls received."""
    x = call_rewards(batch, calls).nan_to_num(nan=0.0)
    total = reduce_by(x, batch.transition_rollout, len(batch.rollouts))
    return core.rewards(batch, reward) + weight * total


@column()
def CallsOrOutcome(batch: Batch, credit: Credit, outcome: Credit, reward: str) -> Tensor:
    """[N] a credit for rollouts of which a call received the reward, `outcome` for the others."""
    known = ~call_rewards(batch, reward).isnan()
    has = reduce_by(known, batch.transition_rollout, len(batch.rollouts)) > 0
    return torch.where(has[batch.token_rollout], credit(batch), outcome(batch))


@preset("archer")
def archer(*, advantage: str = "transition:advantage") -> Algo:
    """REINFORCE with the advantage of each call that an utterance critic gave, as a reward. arXiv
    2402.19446."""
    return Algo(GroupRelative(advantage, base="none"), agg=ROW_SUMS)


@preset("prime", clip=PPO_CLIP)
def prime(
    reward: str, *, process: str = "process", weight: Share = 1.0, scaled: bool = False
) -> Algo:
    """Outcome and returns of a reward of calls, each against the other rollouts, whitened; `scaled`
    divides the process rewards by their largest return. arXiv 2502.01456."""
    stream = RewardStream(scope=Scope.TRANSITION, base="prime", norm="prime" if scaled else "none")
    steps = stream_advantage(process, {process: stream})
    mixed = weighted_sum((GroupRelative(reward, base="loo"), 1.0), (steps, weight))
    return Algo(core.Whiten(mixed), agg=TOKENS)


@preset("istar", clip=PPO_CLIP)
def istar(reward: str, *, process: str = "transition:process", weight: Share = 1.0) -> Algo:
    """Outcome over rollouts plus a reward of calls over all calls of the task, each scaled. arXiv
    2509.19199."""
    steps = GroupRelative(process, norm="std")
    return Algo(weighted_sum((GroupRelative(reward, norm="std"), 1.0), (steps, weight)))


@preset("mt-grpo", clip=PPO_CLIP)
def mt_grpo(reward: str, *, turn_reward: str = "transition:turn", weight: Share = 1.0) -> Algo:
    """Outcome compared over rollouts plus a reward of calls compared within the same turn; where no
    call has one, as without a tool call, the sum of both compared over rollouts. arXiv
    2505.11821."""
    turns = GroupRelative(turn_reward, by=("group", "turn"), norm="std")
    both = weighted_sum((GroupRelative(reward, norm="std"), 1.0), (turns, weight))
    combined = GroupRelative(OutcomePlusCalls(reward, turn_reward, weight), norm="std")
    return Algo(CallsOrOutcome(both, combined, turn_reward))
