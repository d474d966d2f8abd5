"""REINFORCE, RLOO, GRPO, PPO and their variants: baselines, scales and rewards of groups."""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import inf
from typing import ClassVar, Literal

import torch
from torch import Tensor

from agentrl.algorithms.credit import core
from agentrl.algorithms.credit.core import (
    Column,
    CriticValues,
    GroupRelative,
    TokenKLPenalty,
    Whiten,
    rewards,
    rollout_rewards,
)
from agentrl.algorithms.data.batch import Batch
from agentrl.algorithms.data.ids import Level, Unit, known_mean, owner, reduce_by
from agentrl.algorithms.objective.core import TOKENS, Algo
from agentrl.algorithms.presets import declare
from agentrl.algorithms.presets.declare import (
    PPO_CLIP,
    CreditFunction,
    Discount,
    Mix,
    Num,
    modifier,
    outcome_of,
    preset,
)
from agentrl.core.config import Count, Natural
from agentrl.core.errors import ConfigError, TrainingError

Baseline = Literal["none", "mean", "scaled-mean", "loo", "length", "greedy"]


@preset("reinforce", average="sum")
def reinforce(reward: str, *, baseline: Baseline = "none") -> Algo:
    """Reward times log-prob, minus a baseline of the group: the mean, also with rewards scaled up
    for groups without a gradient, the mean of the others ("loo"), one weighted by length, or the
    reward of a greedy rollout, the first of each group, which is not trained. Williams 1992."""
    if baseline == "scaled-mean":
        return Algo(GroupRelative(RescaledByValid(reward)))
    if baseline == "length":
        return Algo(GroupRelative(reward, bw=core.response_lengths))
    if baseline == "greedy":
        return Algo(GroupRelative(SampledRewards(reward), base=GreedyBaseline(reward)))
    return Algo(GroupRelative(reward, base=baseline))


@preset("reinforce++", clip=PPO_CLIP)
def reinforce_pp(reward: str, *, gamma: Num = 1.0, kl_reward: Num = 0.0) -> Algo:
    """Reward-to-go whitened over all tokens; needs no groups. `kl_reward`: coefficient of the KL
    penalty to the reference in every token's reward. arXiv 2501.03262."""
    penalty = TokenKLPenalty(kl_reward) if kl_reward else None
    return Algo(Whiten(core.RewardToGo(reward, gamma, penalty)), agg=TOKENS)


NORMS: dict[str, tuple[core.Norm, tuple[Unit, ...] | None]] = {
    "group": ("std", None),
    "batch": ("std", ("all",)),
    "mean": ("mean", None),
    "tokens": ("none", None),
}


@preset("grpo", clip=(0.2, 0.2, inf), clip_by="token", average="row", kl=True)
def grpo(
    reward: str,
    *,
    std: bool = True,
    scale: Literal["group", "batch", "mean", "tokens"] = "group",
    baseline: Literal["mean", "loo", "none"] = "mean",
    calls: bool = False,
    within: Literal["group", "role", "turn", "prompt"] = "group",
) -> Algo:
    """Group mean and (std) deviation, PPO clip, mean of row means. scale: instead of the group's
    deviation, that of the batch, the group's mean, or mean and deviation of all tokens. calls: each
    call has the reward and is compared. within: "role" compares only the same role's rewards,
    "turn" or "prompt" its calls of the same turn or prompt, also without `calls`. arXiv
    2402.03300."""
    if not std and scale != "group":
        raise ConfigError(
            f"algorithm.options.scale = {scale!r}: has no effect with std = false; remove one"
        )
    norm, norm_by = NORMS[scale] if std else ("none", None)
    by: tuple[Unit, ...] = ("group",) if within == "group" else ("group", "role")
    at: Level | None = "transition" if calls else None
    if within in ("turn", "prompt"):
        at, by = "transition", (*by, within)
    elif within == "role" and at is None and core.level_of(reward) == "rollout":
        at = "role"
    credit = GroupRelative(reward, at, by, baseline, norm, norm_by)
    if scale == "tokens":
        return Algo(Whiten(credit, ("all",) if within == "group" else by[1:]))
    return Algo(credit)


@preset("ppo", clip=PPO_CLIP, kl=True)
def ppo(
    reward: str, *, gamma: Discount = 1.0, lam: Discount = 0.95, kl_reward: declare.Num = 0.0
) -> Algo:
    """GAE over tokens with a critic, whitened, PPO clip. The KL penalty to the reference is in the
    loss (`kl`) or in the rewards (`kl_reward`, arXiv 1909.08593). arXiv 1707.06347."""
    penalty = core.TokenKLPenalty(kl_reward) if kl_reward else None
    return Algo(Whiten(core.Gae(CriticValues(), reward, gamma, lam, penalty)), agg=TOKENS)


OUTCOME = {"outcome": 1.0}


@dataclass(frozen=True, slots=True)
class NonzeroVariance:
    """Filter for tokens of groups whose rewards differ, bool [N]. DAPO, arXiv 2503.14476."""

    reward: str = "outcome"

    def __call__(self, batch: Batch) -> Tensor:
        return core.has_variance(batch, self.reward)[owner(batch, core.level_of(self.reward))]


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


@preset("gdpo", clip=PPO_CLIP)
def gdpo(*, rewards: Mix = OUTCOME) -> Algo:
    """Several rewards (name to weight), each compared separately, then mixed. arXiv 2601.05242."""
    terms = ((GroupRelative(name, norm="std"), weight) for name, weight in rewards.items())
    return Algo(Whiten(core.weighted_sum(*terms)))


@dataclass(frozen=True, slots=True)
class BestOverSecond:
    """The gap between the group's best rollout and the second, 0 for the others and if two are
    best; `std`: divided by the standard deviation of the group. Pass@k, arXiv 2503.19595."""

    reward: str = "outcome"
    std: bool = True

    def __call__(self, batch: Batch) -> Tensor:
        x, group, n = rollout_rewards(batch, self.reward), batch.rollout_group, len(batch.groups)
        rewarded = ~x.isnan()
        best = rewarded & (x == reduce_by(x.nan_to_num(nan=-torch.inf), group, n, "amax")[group])
        second = reduce_by(torch.where(rewarded & ~best, x, -torch.inf), group, n, "amax")[group]
        size, winners = (reduce_by(y, group, n)[group] for y in (rewarded, best))
        single = best & (size > 1) & (winners == 1)
        gap = torch.where(single, x - second, torch.where(rewarded, 0.0, torch.nan))
        if not self.std:
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


@dataclass(frozen=True, slots=True)
class PassAtKBaseline:
    """k / n times the fraction of k-subsets without the rollout that contain a success, [U]. As a
    baseline it leaves the gradient of pass@k unchanged, because it does not depend on the rollout.
    PKPO's s^(loo), arXiv 2505.15201, has 1 / (n - 1) instead of 1 / n, which would punish every
    rollout of a group without failures."""

    reward: str = "outcome"
    k: int = 2

    def __call__(self, batch: Batch) -> Tensor:
        x, n, c = _successes(batch, self.reward)
        value = self.k / n * (1 - _all_fail(n - 1, c - (x > 0).double(), self.k))
        return torch.where(n <= self.k, torch.nan, value)


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


@dataclass(frozen=True, slots=True)
class RescaledByValid:
    """The reward times (known rollouts / rollouts in groups whose rewards differ), to compensate
    for groups with zero gradient. GPG, arXiv 2504.02546."""

    reward: str = "outcome"

    def __call__(self, batch: Batch) -> Tensor:
        x = rewards(batch, self.reward)
        valid = ~x.isnan()
        return x * valid.sum() / (core.has_variance(batch, self.reward) & valid).sum().clamp(1)


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


@modifier("credit")
def with_credit(algo: Algo, *, credit: CreditFunction, credit_reward: str = "") -> Algo:
    """Replaces the host's credit by your function "file.py:name", which takes a batch and returns
    one advantage per token, NaN if missing (arXiv 2402.03300). credit_reward: the reward to put
    into the batch for it; default: the host's."""
    return replace(algo, credit=credit, rewards=(credit_reward or outcome_of(algo),))
