"""Filters and weights for tokens that older versions of the policy sampled.

A token's lag is the number of policy updates since it was sampled; 0 if its version is unknown.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from agentrl.algorithms.credit.core import Column
from agentrl.algorithms.data.batch import Batch
from agentrl.algorithms.objective.core import Algo


@dataclass(frozen=True, slots=True)
class RecentTokens:
    """Filter, bool [N]: the tokens of version `oldest` or later that `keep` (None: all) keeps. The
    reward of a rollout without such tokens still counts in its group's baseline."""

    oldest: int
    keep: Column | None = None

    def __call__(self, batch: Batch) -> Tensor:
        recent = batch.lag(self.oldest) <= 0
        return recent if self.keep is None else recent & self.keep(batch)


def withhold(algo: Algo, batch: Batch, oldest: int) -> Algo:
    """`algo`, with tokens of versions before `oldest` filtered out if the batch has any."""
    if not (batch.lag(oldest) > 0).any():
        return algo
    return replace(algo, keep=RecentTokens(oldest, algo.keep))


def old_policy_share(lag: Tensor) -> Tensor:
    """The fraction s = (lag - 1) / lag in the interpolated old policy o = b + s (p - b), float64
    [N]; 1 at lag 0, where the sampler is the policy itself. A-3PO, arXiv 2512.06547."""
    return torch.where(lag > 0, (lag - 1).double() / lag.clamp(min=1), 1.0)


def effective_share(weights: Tensor) -> float:
    """Effective sample size of n weights divided by n, (sum w)^2 / (n sum w^2); 1 if all are 0."""
    total = weights.square().sum()
    return float(weights.sum().square() / total) / weights.numel() if total > 0 else 1.0
