"""Tokens that older versions of the policy sampled: which may be trained, and how far they count.

The lag of a token is the number of updates of its policy since the version that sampled it. A
version that is not known has lag 0.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from agentrl.algorithms.credit.core import Column
from agentrl.algorithms.data.batch import Batch
from agentrl.algorithms.objective.core import Algo


def token_lag(batch: Batch, version: int) -> Tensor:
    """int64 [N]: updates between the version of each token and `version`."""
    sampled = batch.token_version
    return torch.where(sampled < 0, 0, version - sampled)


@dataclass(frozen=True, slots=True)
class RecentTokens:
    """bool [N]: the tokens that `keep` keeps (None: all), and of versions from `oldest` on. The
    reward of a rollout without such tokens still counts in its group's baseline."""

    oldest: int
    keep: Column | None = None

    def __call__(self, batch: Batch) -> Tensor:
        recent = token_lag(batch, self.oldest) <= 0
        return recent if self.keep is None else recent & self.keep(batch)


def withhold(algo: Algo, batch: Batch, oldest: int) -> Algo:
    """The algorithm without the tokens of versions before `oldest`; itself if there are none."""
    if not (token_lag(batch, oldest) > 0).any():
        return algo
    return replace(algo, keep=RecentTokens(oldest, algo.keep))


def old_policy_share(lag: Tensor) -> Tensor:
    """float64 [N] s in o = b + s (p - b), the policy before this update by the share of the updates
    since the token was sampled that it has had: (lag - 1) / lag. At lag 0 the sampler is the policy
    itself and s = 1. A-3PO, arXiv 2512.06547."""
    return torch.where(lag > 0, (lag - 1).double() / lag.clamp(min=1), 1.0)


def effective_share(weights: Tensor) -> float:
    """Effective sample size of importance weights as a share of their number,
    (sum w)^2 / (n sum w^2); 1 without weights above 0."""
    total = weights.square().sum()
    return float(weights.sum().square() / total) / weights.numel() if total > 0 else 1.0
