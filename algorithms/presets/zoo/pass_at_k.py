"""Objectives of the best of k rollouts."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from agentrl.algorithms.credit.core import GroupRelative, rewards, standardise
from agentrl.algorithms.data.batch import Batch
from agentrl.algorithms.data.ids import reduce_by
from agentrl.algorithms.objective.core import Algo
from agentrl.algorithms.presets.registry import PPO_CLIP, preset
from agentrl.config import Count


@dataclass(frozen=True, slots=True)
class BestOverSecond:
    """By how much the best rollout of the group beats the second, 0 for the others and where two
    are best; `std`: over the deviation of the group's rewards. Pass@k, arXiv 2503.19595."""

    reward: str = "outcome"
    std: bool = True

    def __call__(self, batch: Batch) -> Tensor:
        x, group, n = rewards(batch, self.reward), batch.rollout_group, len(batch.groups)
        known = ~x.isnan()
        size = reduce_by(known, group, n)[group]
        top = reduce_by(x.nan_to_num(nan=-torch.inf), group, n, "amax")[group]
        best = known & (x == top)
        rest = torch.where(known & ~best, x, -torch.inf)
        second = reduce_by(rest, group, n, "amax")[group]
        single = best & (size > 1) & (reduce_by(best, group, n)[group] == 1)
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

    @property
    def min_group(self) -> int:
        return self.k + 1

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
    return x, reduce_by(~x.isnan(), group, m)[group], reduce_by(x > 0, group, m)[group]


def _all_fail(n: Tensor, c: Tensor, k: int) -> Tensor:
    """C(n - c, k) / C(n, k): the share of the k-subsets of n without one of c successes; exactly 1
    where there are none."""
    share = torch.ones_like(n)
    for drawn in range(k):
        share = share * (n - c - drawn).clamp(min=0) / (n - drawn)
    return share


@preset("best-of", clip=PPO_CLIP)
def best_of(reward: str, *, std: bool = True) -> Algo:
    """Pass@k by the gap of the best rollout to the second (verl's grpo_passk). arXiv 2503.19595."""
    credit = GroupRelative(BestOverSecond(reward, std), base="none")
    return Algo(credit)


@preset("pass-at-k", clip=PPO_CLIP)
def pass_at_k(reward: str, *, k: Count = 2) -> Algo:
    """Unbiased pass@k of a reward that is positive on success (PKPO), k below the size of groups.
    arXiv 2505.15201."""
    credit = GroupRelative(PassAtKReward(reward, k), base=PassAtKBaseline(reward, k))
    return Algo(credit)
