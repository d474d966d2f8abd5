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


def variance_components(
    x: Tensor, wide: Tensor, narrow: Tensor, by: Tensor | None = None, errors: float = 0.0
) -> tuple[Tensor, Tensor]:
    """[U] variance of x within narrow groups, and of their expected values within wide groups, from
    the wide groups of several narrow ones: analysis of variance with random effects and unequal
    sizes (Searle, Casella and McCulloch, Variance Components, 1992, 3.6), for each value of `by`,
    which does not divide wide groups; none: for all. Where no such narrow group has two members,
    the variance within is that of all, and without any all variance counts as that of expected
    values. errors: the variance between is less by as many of the standard errors that it has where
    it is 0."""
    narrow, by = key(wide, narrow), key(torch.zeros_like(wide) if by is None else by)
    one = torch.ones_like(x)
    size, total = reduce_by(one, narrow)[narrow], reduce_by(one, wide)[wide]
    several = (size < total).to(x.dtype)
    inner, outer = mean_by(x, narrow)[0], mean_by(x, wide)[0]

    def summed(y: Tensor) -> Tensor:
        return reduce_by(several * y, by)

    members, groups, wides = summed(one), summed(1 / size), summed(1 / total)
    squares, freedom = summed((x - inner).square()), members - groups
    every = squares.sum() / freedom.sum() if freedom.sum() > 0.5 else 0.0
    within = torch.where(freedom > 0.5, squares / freedom, every)
    spread = summed((inner - outer).square()) - (groups - wides) * within
    spread -= errors * within * (2 * (groups - wides)).clamp(min=0.0).sqrt()
    unit = members - summed(size / total)
    between = torch.where(unit > 0, spread / unit, 0.0).clamp(min=0.0)
    return within[by], between[by]


def reliability(count: Tensor, within: Tensor, between: Tensor) -> Tensor:
    """[U] how much of a mean of `count` values is signal, in [0, 1]."""
    signal = count * between
    return torch.where(signal > 0, signal / (signal + within), 0.0)
