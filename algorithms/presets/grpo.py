"""GRPO and the variants of its scale, average, filter and ratio."""

from __future__ import annotations

from dataclasses import dataclass
from math import inf

import torch
from torch import Tensor

from agentrl.algorithms.credit import core
from agentrl.algorithms.credit.core import (
    Column,
    GroupRelative,
    rewards,
    rollout_rewards,
)
from agentrl.algorithms.data.batch import Batch
from agentrl.algorithms.data.ids import owner
from agentrl.algorithms.objective.core import TOKENS, Algo, Average, Gate
from agentrl.algorithms.objective.ratios import Truncate
from agentrl.algorithms.presets.declare import PPO_CLIP, Cap, Num, preset
from agentrl.config import Count, Natural


@preset("grpo", clip=(0.2, 0.2, inf), kl=True)
def grpo(reward: str, *, std: bool = True) -> Algo:
    """Group mean and (std) deviation, PPO clip, mean of row means. arXiv 2402.03300."""
    return Algo(GroupRelative(reward, norm="std" if std else "none"))


@preset("dr-grpo", clip=PPO_CLIP)
def dr_grpo(reward: str, *, length: Count = 1024) -> Algo:
    """GRPO without standard deviation, rows divided by a constant length. arXiv 2503.20783."""
    return Algo(GroupRelative(reward), agg=Average(("row",), "const", length))


@preset("agl-v1", clip=PPO_CLIP)
def agl_v1(reward: str) -> Algo:
    """GRPO averaged over rollouts, however many calls they took. arXiv 2608.17528."""
    return Algo(GroupRelative(reward, norm="std"), agg=Average(("rollout",)))


@dataclass(frozen=True, slots=True)
class NonzeroVariance:
    """Filter for tokens of groups whose rewards differ, bool [N]. DAPO, arXiv 2503.14476."""

    reward: str = "outcome"

    def __call__(self, batch: Batch) -> Tensor:
        return core.has_variance(batch, self.reward)[owner(batch, core.level_of(self.reward))]


@dataclass(frozen=True, slots=True)
class NonzeroVarianceReward:
    """The reward; missing if the rewards of the group do not differ."""

    reward: str = "outcome"

    def __call__(self, batch: Batch) -> Tensor:
        return torch.where(
            core.has_variance(batch, self.reward), rewards(batch, self.reward), torch.nan
        )


@dataclass(frozen=True, slots=True)
class OverlongPenalty:
    """The reward minus a penalty that rises from 0 at `limit` - `cache` action tokens to 1 at
    `limit`; cache is capped at the limit. DAPO, arXiv 2503.14476."""

    reward: str | Column
    limit: int
    cache: int

    def __call__(self, batch: Batch) -> Tensor:
        cache = min(self.cache, self.limit)
        over = (core.response_lengths(batch) - (self.limit - cache)) / cache
        return rollout_rewards(batch, self.reward) - over.clamp(0, 1)


@dataclass(frozen=True, slots=True)
class NotTruncated:
    """Filter for tokens of rollouts that were not truncated, bool [N]. DAPO, arXiv 2503.14476."""

    def __call__(self, batch: Batch) -> Tensor:
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
    keep: Column = NonzeroVariance(reward)
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


SEQUENCE_CLIP = (3e-4, 4e-4)  # for a mean ratio of a row


@preset("gspo", clip=SEQUENCE_CLIP, clip_by="row")
def gspo(reward: str) -> Algo:
    """GRPO with one ratio per row, the geometric mean of its tokens'; with a reward of calls,
    `reward = "transition:name"`, credit differs inside a row. arXiv 2507.18071."""
    return Algo(GroupRelative(reward, norm="std"))


@preset("cispo")
def cispo(reward: str, *, low: Num = 0.0, cap: Cap = 5.0) -> Algo:
    """GRPO with ratios truncated instead of dropped; bounds are absolute. arXiv 2506.13585."""
    gate = Gate(Truncate(low, cap))
    return Algo(GroupRelative(reward, norm="std"), (gate,), agg=TOKENS)
