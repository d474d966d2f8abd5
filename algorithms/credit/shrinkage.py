"""Means of narrow groups, drawn towards those of wider ones by measured variance (empirical Bayes).

x [U] has no missing values here; ids are int64 [U].
"""

from __future__ import annotations

import torch
from torch import Tensor

from agentrl.algorithms.data.ids import key, reduce_by


def mean_by(x: Tensor, ids: Tensor, without: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """[U] the mean of the x with the same id, and of how many; 0 where there is none. without: ids
    of what does not count in its own mean."""
    total, count = reduce_by(x, ids)[ids], reduce_by(torch.ones_like(x), ids)[ids]
    if without is not None:
        own = key(ids, without)
        total = total - reduce_by(x, own)[own]
        count = count - reduce_by(torch.ones_like(x), own)[own]
    return torch.where(count > 0, total / count, 0.0), count


def variance_components(x: Tensor, wide: Tensor, narrow: Tensor) -> tuple[float, float]:
    """Variance of x within narrow groups, and of their expected values within wide groups, from the
    wide groups of several narrow ones: analysis of variance with random effects and unequal sizes
    (Searle, Casella and McCulloch, Variance Components, 1992, 3.6). Where no such narrow group has
    two members, all variance counts as that of expected values."""
    narrow = key(wide, narrow)
    size = reduce_by(torch.ones_like(x), narrow)[narrow]
    several = size < reduce_by(torch.ones_like(x), wide)[wide]
    x, wide, narrow, size = x[several], wide[several], narrow[several], size[several]
    if not x.numel():
        return 0.0, 0.0
    inner, (outer, total) = mean_by(x, narrow)[0], mean_by(x, wide)
    groups = float((1 / size).sum())
    freedom = len(x) - groups
    within = float((x - inner).square().sum()) / freedom if freedom > 0.5 else 0.0
    spread = float((inner - outer).square().sum()) - (groups - float((1 / total).sum())) * within
    return within, max(0.0, spread / (len(x) - float((size / total).sum())))


def reliability(count: Tensor, within: float, between: float) -> Tensor:
    """[U] how much of a mean of `count` values is signal, in [0, 1]."""
    signal = count * between
    return torch.where(signal > 0, signal / (signal + within), 0.0)
