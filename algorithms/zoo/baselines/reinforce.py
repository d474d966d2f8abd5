"""REINFORCE with other baselines and scales."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from agentrl.algorithms.credit import core
from agentrl.algorithms.credit.core import (
    GroupRelative,
    Whiten,
    rewards,
    rollout_rewards,
)
from agentrl.algorithms.data.batch import Batch
from agentrl.algorithms.data.ids import known_mean
from agentrl.algorithms.objective.core import ROW_SUMS, TOKENS, Algo
from agentrl.algorithms.presets.declare import PPO_CLIP, preset
from agentrl.errors import TrainingError


@dataclass(frozen=True, slots=True)
class RescaledByValid:
    """The reward times (known rollouts / rollouts in groups whose rewards differ), to compensate
    for groups with zero gradient. GPG, arXiv 2504.02546."""

    reward: str = "outcome"

    def __call__(self, batch: Batch) -> Tensor:
        x = rewards(batch, self.reward)
        known = ~x.isnan()
        return x * known.sum() / (core.has_variance(batch, self.reward) & known).sum().clamp(1)


@dataclass(frozen=True, slots=True)
class GreedyBaseline:
    """The mean reward of the group's greedy rollouts, missing if it has none. ReMax, arXiv
    2310.10505. A rollout is greedy if all its calls were sampled at temperature 0.

    Raises TrainingError if no group has one."""

    reward: str = "outcome"
    needs_greedy: ClassVar[bool] = True

    def __call__(self, batch: Batch) -> Tensor:
        greedy, group = batch.rollout_greedy, batch.rollout_group
        if batch.n_tokens and not greedy.any():
            raise TrainingError(
                f"step {batch.step}: none of the {len(batch.groups)} groups has a greedy rollout "
                "to compare with; do not set the temperature in the agent: the run requests one "
                "rollout per group at temperature 0"
            )
        x = rollout_rewards(batch, self.reward)
        if not greedy.numel():
            return torch.full_like(x, torch.nan)
        return known_mean(torch.where(greedy, x, torch.nan), group)[group]


@dataclass(frozen=True, slots=True)
class SampledRewards:
    """The reward; missing for greedy rollouts (never trained) and for groups without one."""

    reward: str = "outcome"

    def __call__(self, batch: Batch) -> Tensor:
        base = GreedyBaseline(self.reward)(batch)
        if not batch.rollout_greedy.numel():
            return base
        return torch.where(
            batch.rollout_greedy | base.isnan(), torch.nan, rewards(batch, self.reward)
        )


@preset("reinforce++-baseline", clip=PPO_CLIP)
def baseline(reward: str) -> Algo:
    """Group mean as baseline, whitened over all tokens. arXiv 2501.03262."""
    return Algo(Whiten(GroupRelative(reward)), agg=TOKENS)


@preset("opo")
def opo(reward: str) -> Algo:
    """Length-weighted group mean as baseline, for exact on-policy training. arXiv 2505.23585."""
    return Algo(GroupRelative(reward, bw=core.response_lengths), agg=TOKENS)


@preset("gpg")
def gpg(reward: str) -> Algo:
    """Group mean as baseline, scaled up for groups without a gradient. arXiv 2504.02546."""
    return Algo(GroupRelative(RescaledByValid(reward)), agg=TOKENS)


@preset("remax")
def remax(reward: str) -> Algo:
    """A greedy rollout as baseline: the first of each group, not trained. arXiv 2310.10505."""
    return Algo(GroupRelative(SampledRewards(reward), base=GreedyBaseline(reward)), agg=ROW_SUMS)


@preset("maxrl", clip=PPO_CLIP)
def maxrl(reward: str) -> Algo:
    """Group mean as baseline and as scale, for rewards >= 0. arXiv 2602.02710."""
    return Algo(GroupRelative(reward, norm="mean"), agg=TOKENS)
