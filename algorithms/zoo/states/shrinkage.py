"""Statistics to shrink means of narrow groups towards those of wide groups (empirical Bayes).

x [U] must have no missing values; ids are int64 [U].
"""

from __future__ import annotations

import torch
from torch import Tensor

from agentrl.algorithms.credit.states import mean_by
from agentrl.algorithms.data.ids import key, reduce_by


def variance_components(
    x: Tensor, wide: Tensor, narrow: Tensor, by: Tensor | None = None, errors: float = 0.0
) -> tuple[Tensor, Tensor]:
    """Variance of x within narrow groups, and of their expected values within wide ones, [U] each.

    Analysis of variance with random effects and unequal sizes (Searle, Casella and McCulloch,
    Variance Components, 1992, 3.6), over wide groups with several narrow ones. by: ids to estimate
    separately for, each wide group in one of them; default: one estimate. If no narrow group of an
    id has two members, the variance within is the pooled one; if none at all has, it is 0. errors:
    number of standard errors (under a true variance of 0) to subtract from the variance between.
    """
    narrow, by = key(wide, narrow), key(torch.zeros_like(wide) if by is None else by)
    one = torch.ones_like(x)
    size, total = reduce_by(one, narrow)[narrow], reduce_by(one, wide)[wide]
    several = (size < total).to(x.dtype)
    inner, outer = mean_by(x, narrow)[0], mean_by(x, wide)[0]

    def summed(y: Tensor) -> Tensor:
        return reduce_by(several * y, by)

    members, groups, wides = summed(one), summed(1 / size), summed(1 / total)
    squares, freedom = summed((x - inner).square()), members - groups
    every = squares.sum() / freedom.sum().clamp(min=1.0)
    within = torch.where(freedom > 0.5, squares / freedom, every)
    spread = summed((inner - outer).square()) - (groups - wides) * within
    spread -= errors * within * (2 * (groups - wides)).clamp(min=0.0).sqrt()
    unit = members - summed(size / total)
    between = torch.where(unit > 0, spread / unit, 0.0).clamp(min=0.0)
    return within[by], between[by]


def reliability(count: Tensor, within: Tensor, between: Tensor) -> Tensor:
    """Fraction of the variance of a mean of `count` values that is signal, in [0, 1], [U]."""
    signal = count * between
    return torch.where(signal > 0, signal / (signal + within), 0.0)
