"""Gate functions: importance weights, clips and masks as a factor >= 0 of the advantage.

Each takes lr [n] (a pooled log-ratio of two streams, r = e^lr), the advantages [n] and the streams
[n] by letter, and returns detached factors [n], which are 1 at r = 1. The loss
-sg[factor * A] * log pi has the gradient of the published surrogate.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import inf
from typing import ClassVar, Protocol

import torch
from torch import Tensor

LOG_LIMIT = 20.0  # |log r| is clamped to this against overflow


class GateFn(Protocol):
    def __call__(self, lr: Tensor, advantage: Tensor, streams: Mapping[str, Tensor]) -> Tensor: ...


def ratio(lr: Tensor) -> Tensor:
    """r = e^lr, finite for any lr."""
    return lr.clamp(-LOG_LIMIT, LOG_LIMIT).exp()


@dataclass(frozen=True, slots=True)
class Ratio:
    """r: the plain importance weight."""

    def __call__(self, lr: Tensor, advantage: Tensor, streams: Mapping[str, Tensor]) -> Tensor:
        return ratio(lr)


@dataclass(frozen=True, slots=True)
class TrustRegion:
    """1 inside PPO's one-sided trust region, else 0: r <= 1 + hi where A >= 0, 1 - lo <= r <= dual
    where A < 0. MiniRL, arXiv 2512.01374."""

    lo: float = 0.2
    hi: float = 0.2
    dual: float = inf

    def __call__(self, lr: Tensor, advantage: Tensor, streams: Mapping[str, Tensor]) -> Tensor:
        r = ratio(lr)
        down = (r >= 1 - self.lo) & (r <= self.dual)
        return torch.where(advantage >= 0, r <= 1 + self.hi, down).double()


@dataclass(frozen=True, slots=True)
class Clip(TrustRegion):
    """r inside the trust region, else 0: PPO's clip (arXiv 1707.06347), clip-higher (2503.14476),
    dual clip (1912.09729)."""

    def __call__(self, lr: Tensor, advantage: Tensor, streams: Mapping[str, Tensor]) -> Tensor:
        return ratio(lr) * TrustRegion.__call__(self, lr, advantage, streams)


@dataclass(frozen=True, slots=True)
class Truncate:
    """r clamped to [lo, hi], both absolute; no token is dropped. CISPO (arXiv 2506.13585), TIS."""

    lo: float = 0.0
    hi: float = 2.0

    def __call__(self, lr: Tensor, advantage: Tensor, streams: Mapping[str, Tensor]) -> Tensor:
        return ratio(lr).clamp(self.lo, self.hi)


@dataclass(frozen=True, slots=True)
class InRange:
    """1 where lo <= r <= hi, else 0: rejection."""

    is_mask: ClassVar[bool] = True  # not a weight, so it can be combined with a correction
    lo: float
    hi: float

    def __call__(self, lr: Tensor, advantage: Tensor, streams: Mapping[str, Tensor]) -> Tensor:
        r = ratio(lr)
        return ((r >= self.lo) & (r <= self.hi)).double()


@dataclass(frozen=True, slots=True)
class RatioInRange:
    """r where lo <= r <= hi, else 0: MIS, IcePop."""

    lo: float = 0.5
    hi: float = 5.0

    def __call__(self, lr: Tensor, advantage: Tensor, streams: Mapping[str, Tensor]) -> Tensor:
        return ratio(lr) * InRange(self.lo, self.hi)(lr, advantage, streams)
