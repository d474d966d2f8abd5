"""Rewards of rollouts made from rewards: what is compared when it is not the reward itself.

A column here gives one number per rollout, float64 [U]; NaN = missing. `TokenKLPenalty` is
subtracted from rewards per token.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from agentrl.algorithms.credit.core import (
    Column,
    response_lengths,
    rewards,
    standardise,
    was_truncated,
)
from agentrl.algorithms.data.batch import Batch
from agentrl.algorithms.data.ids import known_mean, segment_reduce
from agentrl.errors import TrainingError


@dataclass(frozen=True, slots=True)
class GreedyBaseline:
    """The mean reward of the greedy rollouts of the group, missing where it has none. ReMax, arXiv
    2310.10505. A rollout is greedy if all its calls were sampled at temperature 0.

    Raises TrainingError where no group has one."""

    reward: str = "outcome"

    def __call__(self, batch: Batch) -> Tensor:
        greedy, group = batch.rollout_greedy, batch.rollout_group
        if batch.n_tokens and not greedy.any():
            raise TrainingError(
                f"step {batch.step}: none of the {len(batch.groups)} groups has a greedy rollout "
                "to compare with; let the agent leave the temperature to the run, which asks for "
                "one rollout per group at temperature 0"
            )
        x = rewards(batch, self.reward)
        if not greedy.numel():
            return torch.full_like(x, torch.nan)
        return known_mean(torch.where(greedy, x, torch.nan), group)[group]


@dataclass(frozen=True, slots=True)
class SampledRewards:
    """The reward; missing for greedy rollouts, which are never trained on, and where the group has
    none."""

    reward: str = "outcome"

    def __call__(self, batch: Batch) -> Tensor:
        base = GreedyBaseline(self.reward)(batch)
        if not batch.rollout_greedy.numel():
            return base
        lost = batch.rollout_greedy | base.isnan()
        return torch.where(lost, torch.nan, rewards(batch, self.reward))


@dataclass(frozen=True, slots=True)
class BestOverSecond:
    """By how much the best rollout of the group beats the second, 0 for the others and where two
    are best; `std`: over the deviation of the group's rewards. Pass@k, arXiv 2503.19595."""

    reward: str = "outcome"
    std: bool = True

    def __call__(self, batch: Batch) -> Tensor:
        x, group, n = rewards(batch, self.reward), batch.rollout_group, len(batch.groups)
        known = ~x.isnan()
        size = segment_reduce(known, group, n)[group]
        top = segment_reduce(x.nan_to_num(nan=-torch.inf), group, n, "amax")[group]
        best = known & (x == top)
        rest = torch.where(known & ~best, x, -torch.inf)
        second = segment_reduce(rest, group, n, "amax")[group]
        single = best & (size > 1) & (segment_reduce(best, group, n)[group] == 1)
        gap = torch.where(single, x - second, torch.where(known, 0.0, torch.nan))
        if not self.std:
            return gap
        return torch.where(single, gap / standardise(x, group, norm="std").scale, gap)


@dataclass(frozen=True, slots=True)
class PassAtKReward:
    """k / n times the share of the k-subsets with the rollout that contain a success: all of them
    for a success, 1 - C(n-1-c, k-1) / C(n-1, k-1) for a failure, of n rollouts with c successes
    (reward > 0). Missing in groups of k or fewer, whose baseline is not known. PKPO, arXiv
    2505.15201."""

    reward: str = "outcome"
    k: int = 2

    def __call__(self, batch: Batch) -> Tensor:
        x, n, c = _successes(batch, self.reward)
        share = self.k / n * torch.where(x > 0, 1.0, 1 - _all_fail(n - 1, c, self.k - 1))
        return torch.where(x.isnan() | (n <= self.k), torch.nan, share)


@dataclass(frozen=True, slots=True)
class PassAtKBaseline:
    """[U] k / n times the share of the k-subsets without the rollout that contain a success. It
    does not depend on the rollout, so as a baseline it leaves the gradient of pass@k what it is.
    PKPO's s^(loo), arXiv 2505.15201, has 1 / (n - 1) in the place of 1 / n, by which it would
    punish every rollout of a group that has no failures."""

    reward: str = "outcome"
    k: int = 2

    def __call__(self, batch: Batch) -> Tensor:
        x, n, c = _successes(batch, self.reward)
        share = self.k / n * (1 - _all_fail(n - 1, c - (x > 0).double(), self.k))
        return torch.where(n <= self.k, torch.nan, share)


def _successes(batch: Batch, reward: str) -> tuple[Tensor, Tensor, Tensor]:
    """Rewards, and of the group of each how many are known, and how many of these are above 0."""
    x, group, m = rewards(batch, reward), batch.rollout_group, len(batch.groups)
    return x, segment_reduce(~x.isnan(), group, m)[group], segment_reduce(x > 0, group, m)[group]


def _all_fail(n: Tensor, c: Tensor, k: int) -> Tensor:
    """C(n - c, k) / C(n, k): the share of the k-subsets of n without one of c successes; exactly 1
    where there are none."""
    share = torch.ones_like(n)
    for drawn in range(k):
        share = share * (n - c - drawn).clamp(min=0) / (n - drawn)
    return share


@dataclass(frozen=True, slots=True)
class OverlongPenalty:
    """The reward minus a penalty for action tokens beyond `limit` - `cache`, up to 1 at `limit`.
    DAPO, arXiv 2503.14476."""

    reward: str | Column
    limit: int
    cache: int

    def __call__(self, batch: Batch) -> Tensor:
        over = (response_lengths(batch) - (self.limit - self.cache)) / self.cache
        return rewards(batch, self.reward) - over.clamp(0, 1)


@dataclass(frozen=True, slots=True)
class NotTruncated:
    """bool [N]: tokens of rollouts that no token limit cut off. DAPO's overlong filtering."""

    def __call__(self, batch: Batch) -> Tensor:
        return ~was_truncated(batch)[batch.token_rollout]


@dataclass(frozen=True, slots=True)
class AllFilters:
    """bool [N]: tokens that all filters keep."""

    keep: tuple[Column, ...]

    def __call__(self, batch: Batch) -> Tensor:
        return torch.stack([keep(batch) for keep in self.keep]).all(0)


@dataclass(frozen=True, slots=True)
class TokenKLPenalty:
    """[N] beta * (b - q): the price, in rewards, of leaving the reference. Its sum over a rollout
    estimates beta times their KL without bias, because b is what was sampled from. arXiv
    1909.08593."""

    beta: float

    def __call__(self, batch: Batch) -> Tensor:
        if batch.reference.numel() != batch.n_tokens:
            raise TrainingError(
                f"step {batch.step}: the algorithm needs the log-probs of a reference model for "
                f"{batch.n_tokens} tokens (stream q), and there are none; set its coefficient to 0"
            )
        return self.beta * (batch.behaviour.double() - batch.reference.double())
