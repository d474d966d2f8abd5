"""GRPO and variants that differ in scale, average, filter or reward."""

from __future__ import annotations

from dataclasses import dataclass
from math import inf

import torch
from torch import Tensor

from agentrl.algorithms.credit import core
from agentrl.algorithms.credit.core import (
    Column,
    GroupRelative,
    Whiten,
    column,
    rewards,
    rollout_rewards,
)
from agentrl.algorithms.data.batch import Batch
from agentrl.algorithms.data.ids import owner, reduce_by
from agentrl.algorithms.objective.core import TOKENS, Algo, Average, Gate
from agentrl.algorithms.objective.ratios import Truncate
from agentrl.algorithms.presets.registry import PPO_CLIP, Cap, Mix, preset
from agentrl.config import Count, Natural

OUTCOME = {"outcome": 1.0}


@preset("grpo", clip=(0.2, 0.2, inf), kl=True)
def grpo(reward: str, *, std: bool = True) -> Algo:
    """Group mean and (std) deviation, PPO clip, mean of row means. arXiv 2402.03300."""
    return Algo(GroupRelative(reward, norm="std" if std else "none"))


@preset("dr-grpo", clip=PPO_CLIP)
def dr_grpo(reward: str, *, length: Count = 1024) -> Algo:
    """GRPO without standard deviation, rows divided by a constant length. arXiv 2503.20783."""
    return Algo(GroupRelative(reward), agg=Average(("row",), "const", length))


@preset("liteppo", clip=PPO_CLIP)
def liteppo(reward: str) -> Algo:
    """Group mean, standard deviation of the whole batch, token mean. arXiv 2508.08221."""
    return Algo(GroupRelative(reward, norm="std", norm_by=("all",)), agg=TOKENS)


@preset("gdpo", clip=PPO_CLIP)
def gdpo(*, rewards: Mix = OUTCOME) -> Algo:
    """Several rewards (name to weight), each compared separately, then mixed. arXiv 2601.05242."""
    terms = ((GroupRelative(name, norm="std"), weight) for name, weight in rewards.items())
    return Algo(Whiten(core.weighted_sum(*terms)))


@preset("agl-v0", clip=PPO_CLIP)
def agl_v0(reward: str) -> Algo:
    """LightningRL as first released: every call has the final reward, compared over calls, token
    mean. arXiv 2508.03680."""
    return Algo(GroupRelative(reward, at="transition", norm="std"), agg=TOKENS)


@preset("agl-v1", clip=PPO_CLIP)
def agl_v1(reward: str) -> Algo:
    """GRPO averaged over rollouts, however many calls they took. arXiv 2608.17528."""
    return Algo(GroupRelative(reward, norm="std"), agg=Average(("rollout",)))


@column()
def NonzeroVariance(batch: Batch, reward: str = "outcome") -> Tensor:
    """Filter for tokens of groups whose rewards differ, bool [N]. DAPO, arXiv 2503.14476."""
    return core.has_variance(batch, reward)[owner(batch, core.level_of(reward))]


@column()
def NonzeroVarianceReward(batch: Batch, reward: str = "outcome") -> Tensor:
    """The reward; missing if the rewards of the group do not differ."""
    return torch.where(core.has_variance(batch, reward), rewards(batch, reward), torch.nan)


@column()
def OverlongPenalty(batch: Batch, reward: str | Column, limit: int, cache: int) -> Tensor:
    """The reward minus a penalty that rises from 0 at `limit` - `cache` action tokens to 1 at
    `limit`; cache is capped at the limit. DAPO, arXiv 2503.14476."""
    cache = min(cache, limit)
    over = (core.response_lengths(batch) - (limit - cache)) / cache
    return rollout_rewards(batch, reward) - over.clamp(0, 1)


@column()
def NotTruncated(batch: Batch) -> Tensor:
    """Filter for tokens of rollouts that were not truncated, bool [N]. DAPO, arXiv 2503.14476."""
    return ~core.was_truncated(batch)[batch.token_rollout]


@preset("dapo", clip=(0.2, 0.28))
def dapo(
    reward: str,
    *,
    overlong_limit: Natural = 0,
    overlong_cache: Count = 4096,
    drop_truncated: bool = False,
) -> Algo:
    """Clip-higher, token mean, groups of equal rewards resampled; optionally a penalty on the last
    `overlong_cache` of `overlong_limit` tokens, or no truncated rollouts. arXiv 2503.14476."""
    shaped = OverlongPenalty(reward, overlong_limit, overlong_cache) if overlong_limit else reward
    # Filter by the raw reward: with a length penalty the rewards of every group would differ.
    keep = NonzeroVariance(reward)
    if drop_truncated:
        keep = core.AllFilters((keep, NotTruncated()))
    return Algo(GroupRelative(shaped, norm="std"), agg=TOKENS, keep=keep, resample=reward)


@preset("scalerl")
def scalerl(reward: str, *, cap: Cap = 5.0) -> Algo:
    """Truncated weight against the sampler, batch standard deviation over groups whose rewards
    differ, mean over prompts. For its other settings see `algorithms/README.md`. arXiv 2510.13786.
    """
    credit = GroupRelative(NonzeroVarianceReward(reward), norm="std", norm_by=("all",))
    return Algo(credit, (Gate(Truncate(0.0, cap), den="sampler"),), agg=Average(("group",)))


@column()
def BestOverSecond(batch: Batch, reward: str = "outcome", std: bool = True) -> Tensor:
    """The gap of the group's best rollout to the second, 0 for the others and if two are best;
    `std`: divided by the standard deviation of the group. Pass@k, arXiv 2503.19595."""
    x, group, n = rollout_rewards(batch, reward), batch.rollout_group, len(batch.groups)
    known = ~x.isnan()
    best = known & (x == reduce_by(x.nan_to_num(nan=-torch.inf), group, n, "amax")[group])
    second = reduce_by(torch.where(known & ~best, x, -torch.inf), group, n, "amax")[group]
    size, winners = (reduce_by(y, group, n)[group] for y in (known, best))
    single = best & (size > 1) & (winners == 1)
    gap = torch.where(single, x - second, torch.where(known, 0.0, torch.nan))
    if not std:
        return gap
    scale = core.standardise(x, group, norm="std").scale  # 0 where rewards differ by rounding
    return torch.where(single, torch.where(scale > 0, gap / scale, 0.0), gap)


@dataclass(frozen=True, slots=True)
class PassAtKReward:
    """k / n times the fraction of k-subsets with the rollout that contain a success: 1 for a
    success, 1 - C(n-1-c, k-1) / C(n-1, k-1) for a failure, with n rollouts and c successes
    (reward > 0). Missing in groups of k or fewer, whose baseline is undefined. PKPO, arXiv
    2505.15201."""

    reward: str = "outcome"
    k: int = 2

    @property
    def min_group(self) -> int:
        return self.k + 1

    def __call__(self, batch: Batch) -> Tensor:
        x, n, c = _successes(batch, self.reward)
        value = self.k / n * torch.where(x > 0, 1.0, 1 - _all_fail(n - 1, c, self.k - 1))
        return torch.where(x.isnan() | (n <= self.k), torch.nan, value)


@column()
def PassAtKBaseline(batch: Batch, reward: str = "outcome", k: int = 2) -> Tensor:
    """k / n times the fraction of k-subsets without the rollout that contain a success, [U]. As a
    baseline it leaves the gradient of pass@k unchanged, because it does not depend on the rollout.
    PKPO's s^(loo), arXiv 2505.15201, has 1 / (n - 1) instead of 1 / n, which would punish every
    rollout of a group without failures."""
    x, n, c = _successes(batch, reward)
    value = k / n * (1 - _all_fail(n - 1, c - (x > 0).double(), k))
    return torch.where(n <= k, torch.nan, value)


def _successes(batch: Batch, reward: str) -> tuple[Tensor, Tensor, Tensor]:
    """Rewards, and the numbers of known and of positive rewards in the group of each, [U] each."""
    x, group, m = rollout_rewards(batch, reward), batch.rollout_group, len(batch.groups)
    return x, reduce_by(~x.isnan(), group, m)[group], reduce_by(x > 0, group, m)[group]


def _all_fail(n: Tensor, c: Tensor, k: int) -> Tensor:
    """C(n - c, k) / C(n, k): fraction of k-subsets of n without any of c successes; 1 if c = 0."""
    fraction = torch.ones_like(n)
    for drawn in range(k):
        fraction = fraction * (n - c - drawn).clamp(min=0) / (n - drawn)
    return fraction


@preset("best-of", clip=PPO_CLIP)
def best_of(reward: str, *, std: bool = True) -> Algo:
    """Pass@k by the gap of the best rollout to the second (verl's grpo_passk). arXiv 2503.19595."""
    return Algo(GroupRelative(BestOverSecond(reward, std), base="none"))


@preset("pass-at-k", clip=PPO_CLIP)
def pass_at_k(reward: str, *, k: Count = 2) -> Algo:
    """Unbiased pass@k of a reward that is positive on success (PKPO), for k below the group size.
    arXiv 2505.15201."""
    return Algo(GroupRelative(PassAtKReward(reward, k), base=PassAtKBaseline(reward, k)))
