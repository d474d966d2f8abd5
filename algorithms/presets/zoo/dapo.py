"""DAPO and ScaleRL: groups whose rewards do not differ are filtered out."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from agentrl.algorithms.credit.core import (
    AllFilters,
    Column,
    GroupRelative,
    has_variance,
    level_of,
    response_lengths,
    rewards,
    was_truncated,
)
from agentrl.algorithms.data.batch import Batch
from agentrl.algorithms.data.ids import owner
from agentrl.algorithms.objective.core import Algo, Gate
from agentrl.algorithms.objective.ratios import Truncate
from agentrl.algorithms.presets.registry import PROMPTS, TOKENS, Cap, preset
from agentrl.config import Count, Natural


@dataclass(frozen=True, slots=True)
class NonzeroVariance:
    """bool [N]: tokens of groups whose rewards differ. DAPO's filter, arXiv 2503.14476."""

    reward: str = "outcome"

    def __call__(self, batch: Batch) -> Tensor:
        return has_variance(batch, self.reward)[owner(batch, level_of(self.reward))]


@dataclass(frozen=True, slots=True)
class NonzeroVarianceReward:
    """The reward, missing where the rewards of the group do not differ."""

    reward: str = "outcome"

    def __call__(self, batch: Batch) -> Tensor:
        return torch.where(has_variance(batch, self.reward), rewards(batch, self.reward), torch.nan)


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


@preset("dapo", clip=(0.2, 0.28))
def dapo(
    reward: str,
    *,
    overlong_limit: Natural = 0,
    overlong_cache: Count = 4096,
    drop_truncated: bool = False,
) -> Algo:
    """Clip-higher, token mean, groups of equal rewards replaced by others, and if asked a penalty
    on the last `overlong_cache` of `overlong_limit` tokens, or no truncated rollouts. arXiv
    2503.14476."""
    shaped = OverlongPenalty(reward, overlong_limit, overlong_cache) if overlong_limit else reward
    # Groups are judged by the raw reward: a length penalty would make each of them differ.
    keep = (
        AllFilters((NonzeroVariance(reward), NotTruncated()))
        if drop_truncated
        else NonzeroVariance(reward)
    )
    credit = GroupRelative(shaped, norm="std")
    return Algo(credit, agg=TOKENS, keep=keep, resample=reward)


@preset("scalerl")
def scalerl(reward: str, *, cap: Cap = 5.0) -> Algo:
    """Truncated weight against the sampler, batch deviation over groups whose rewards differ, mean
    over prompts. arXiv 2510.13786."""
    credit = GroupRelative(NonzeroVarianceReward(reward), norm="std", norm_by=("all",))
    return Algo(credit, (Gate(Truncate(0.0, cap), den="b"),), agg=PROMPTS)
