"""Filters, weights and metrics of tokens that older versions of the policy sampled.

A token's lag is the number of policy updates since it was sampled; 0 if its version is unknown.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import ceil
from statistics import fmean

import torch
from torch import Tensor

from agentrl.algorithms.credit.core import Column
from agentrl.algorithms.data.batch import Batch
from agentrl.algorithms.data.merge import own_calls, token_versions
from agentrl.algorithms.objective.core import Algo
from agentrl.types import POLICY, Group


@dataclass(frozen=True, slots=True)
class RecentTokens:
    """Filter, bool [N]: the tokens of version `oldest` or later that `keep` (None: all) keeps. The
    reward of a rollout without such tokens still counts in its group's baseline."""

    oldest: int
    keep: Column | None = None

    def __call__(self, batch: Batch) -> Tensor:
        recent = ~batch.too_old(self.oldest)
        return recent if self.keep is None else recent & self.keep(batch)


def withhold(algo: Algo, batch: Batch, oldest: int) -> Algo:
    """`algo`, with tokens of versions before `oldest` filtered out if the batch has any."""
    if not batch.too_old(oldest).any():
        return algo
    return replace(algo, keep=RecentTokens(oldest, algo.keep))


def old_policy_share(lag: Tensor) -> Tensor:
    """The fraction s = (lag - 1) / lag in the interpolated old policy, whose log-probs are
    sampler + s (current - sampler), float64 [N]; 1 at lag 0, where the sampler is the policy
    itself. A-3PO, arXiv 2512.06547."""
    return torch.where(lag > 0, (lag - 1).double() / lag.clamp(min=1), 1.0)


def effective_share(weights: Tensor) -> float:
    """Effective sample size of n weights divided by n, (sum w)^2 / (n sum w^2); 1 if all are 0."""
    total = weights.square().sum()
    return float(weights.sum().square() / total) / weights.numel() if total > 0 else 1.0


def staleness_metrics(
    step: int, groups: Sequence[Group], policy: str = POLICY, *, version: int | None = None
) -> dict[str, float]:
    """Age of the data of step `step`. staleness/steps_mean, steps_max: steps from the one that a
    group was planned for to this one; below 0 if it is trained earlier, which only
    `algorithm.group_order = "ready"` allows. staleness/version_mean, version_p95, version_max:
    updates of the policy since a token was sampled, over tokens with a known version.
    staleness/mixed: number of calls during which weights changed. version: the policy's current
    version, default `step`."""
    now = step if version is None else version
    metrics: dict[str, float] = {}
    if ages := [step - group.step for group in groups]:
        metrics |= {"staleness/steps_mean": fmean(ages), "staleness/steps_max": max(ages)}
    calls = [c for c in own_calls(groups, policy) if c.version is not None and c.completion]
    if calls:
        lags = now - torch.cat(list(map(token_versions, calls)))
        metrics["staleness/version_mean"] = float(lags.double().mean())
        metrics["staleness/version_p95"] = float(lags.kthvalue(ceil(0.95 * lags.numel())).values)
        metrics["staleness/version_max"] = float(lags.max())
        metrics["staleness/mixed"] = sum(bool(call.spans) for call in calls)
    return metrics
