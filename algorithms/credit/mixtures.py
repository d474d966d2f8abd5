"""Mixing rewards: sums of what calls received, and credits that bound or gate one another.

A column here gives one number per call, float64 [S]; NaN = missing.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor

from agentrl.algorithms.credit.core import (
    Column,
    Credit,
    GroupRelative,
    WeightedSum,
    rewards,
    standardise,
)
from agentrl.algorithms.credit.turns import call_rewards, discounted_return, turn_discounts
from agentrl.algorithms.data.batch import Batch
from agentrl.algorithms.data.ids import Level, known_mean, lift, next_with_same_id, segment_reduce

Agreement = Literal["agree", "positive", "negative"]


@dataclass(frozen=True, slots=True)
class SumOfCalls(WeightedSum):
    """[S] weighted sum of columns of calls; what is missing in one counts as 0 there."""

    level: ClassVar[Level] = "transition"


@dataclass(frozen=True, slots=True)
class DiscountedAdvantages:
    """[S] advantages of calls, or of what is above them, fading towards the start."""

    rel: GroupRelative
    gamma: float = 1.0
    level: ClassVar[Level] = "transition"

    def __call__(self, batch: Batch) -> Tensor:
        x = lift(batch, self.rel.of_units(batch), self.rel.level, "transition")
        return x * turn_discounts(batch, self.gamma)


@dataclass(frozen=True, slots=True)
class ScaledByLargestReturn:
    """[S] rewards over the largest |return| of the batch. PRIME, arXiv 2502.01456."""

    reward: str | Column
    level: ClassVar[Level] = "transition"

    def __call__(self, batch: Batch) -> Tensor:
        x = call_rewards(batch, self.reward)
        returns = discounted_return(x, 1.0, next_with_same_id(batch.transition_rollout)).abs()
        largest = returns.nan_to_num(nan=0.0).max() if returns.numel() else torch.ones(())
        return x / largest if largest > 0 else x


@dataclass(frozen=True, slots=True)
class CentredOnOthers:
    """[S] rewards minus the mean over the other rollouts of the group of theirs per call; 0 where
    there is no other. PRIME, arXiv 2502.01456."""

    reward: str | Column
    level: ClassVar[Level] = "transition"

    def __call__(self, batch: Batch) -> Tensor:
        x, rollout, n = (
            call_rewards(batch, self.reward),
            batch.transition_rollout,
            len(batch.rollouts),
        )
        mean = known_mean(x, rollout, n)
        base = standardise(mean, batch.rollout_group, base="loo").baseline
        others = (
            segment_reduce(~mean.isnan(), batch.rollout_group, len(batch.groups))[
                batch.rollout_group
            ]
            > 1
        )
        return torch.where(others[rollout], x - base[rollout], 0.0 * x)


@dataclass(frozen=True, slots=True)
class OutcomePlusCalls:
    """[U] the reward of a rollout plus `weight` times what its calls received."""

    reward: str | Column
    calls: str
    weight: float = 1.0

    def __call__(self, batch: Batch) -> Tensor:
        x = call_rewards(batch, self.calls).nan_to_num(nan=0.0)
        total = segment_reduce(x, batch.transition_rollout, len(batch.rollouts))
        return rewards(batch, self.reward) + self.weight * total


@dataclass(frozen=True, slots=True)
class CallsOrOutcome:
    """[N] a credit for rollouts of which a call received the reward, `outcome` for the others."""

    credit: Credit
    outcome: Credit
    reward: str

    def __call__(self, batch: Batch) -> Tensor:
        known = ~call_rewards(batch, self.reward).isnan()
        has = segment_reduce(known, batch.transition_rollout, len(batch.rollouts)) > 0
        return torch.where(has[batch.token_rollout], self.credit(batch), self.outcome(batch))


@dataclass(frozen=True, slots=True)
class ClampedAdvantage:
    """[N] a credit within +- limit."""

    credit: Credit
    limit: float

    def __call__(self, batch: Batch) -> Tensor:
        return self.credit(batch).clamp(-self.limit, self.limit)


@dataclass(frozen=True, slots=True)
class GatedByOutcome:
    """[N] a credit where the outcome agrees, else 0; missing where the outcome is.

    agree: both have the same sign. positive: what is good counts only where the outcome is good,
    negative: what is bad only where it is bad."""

    credit: Credit
    outcome: Credit
    how: Agreement

    def __call__(self, batch: Batch) -> Tensor:
        a, outcome = self.credit(batch), self.outcome(batch)
        agrees = a * outcome > 0
        if self.how != "agree":
            sign = 1 if self.how == "positive" else -1
            agrees |= sign * a <= 0
        return torch.where(outcome.isnan() | a.isnan(), torch.nan, torch.where(agrees, a, 0.0))
