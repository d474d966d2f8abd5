"""Gate functions: how far a sample is trusted, as a factor >= 0 of its advantage.

Each is called with lr [n] (a pooled log-ratio of two streams, r = e^lr), the advantages [n] and the
streams [n] by letter, and returns factors [n], detached. The loss -sg[factor * A] * log pi has the
gradient of the published surrogate. At r = 1 every factor is 1.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import inf
from typing import Literal, Protocol

import torch
from torch import Tensor

LOG_LIMIT = 20.0  # |log r| beyond which a ratio carries no information, only overflow


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
class Clip:
    """r inside the trust region, else 0: PPO's clip (arXiv 1707.06347), clip-higher (2503.14476),
    dual clip (1912.09729)."""

    lo: float = 0.2
    hi: float = 0.2
    dual: float = inf

    def __call__(self, lr: Tensor, advantage: Tensor, streams: Mapping[str, Tensor]) -> Tensor:
        return ratio(lr) * TrustRegion(self.lo, self.hi, self.dual)(lr, advantage, streams)


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


@dataclass(frozen=True, slots=True)
class DivergenceGate:
    """min(r, cap), but 0 where the update would carry a probability still further from the
    sampler's than `hi` upwards or `lo` downwards. For num "p", den "b". DPPO, arXiv 2602.04879."""

    kind: Literal["tv", "kl"] = "tv"
    lo: float = 0.15
    hi: float = 0.15
    cap: float = 20.0

    def __call__(self, lr: Tensor, advantage: Tensor, streams: Mapping[str, Tensor]) -> Tensor:
        mu, pi = streams["b"].exp(), streams["p"].exp()
        distance = (pi - mu).abs()
        if self.kind == "kl":
            rest_mu, rest_pi = (1 - mu).clamp(min=1e-8), (1 - pi).clamp(min=1e-8)
            distance = rest_mu * (rest_mu / rest_pi).log() - mu * lr
        return self.held(lr, advantage * (pi - mu), distance)

    def held(self, lr: Tensor, onward: Tensor, distance: Tensor) -> Tensor:
        """Factors where a probability has moved so far; onward > 0: and is to move on that way."""
        bound = torch.where(lr > 0, self.hi, self.lo)
        return ratio(lr).clamp(max=self.cap) * ~((onward > 0) & (distance > bound))


@dataclass(frozen=True, slots=True)
class TopKDivergenceGate(DivergenceGate):
    """As `DivergenceGate`, but the distance is between the distributions over k tokens (the sampled
    one and the most probable others before the first update) and one symbol for all the rest. For
    num "p", den "o", with these log-probs as p_K and o_K. In the first step o is p: 1. DPPO, arXiv
    2602.04879."""

    k: int = 20

    def __call__(self, lr: Tensor, advantage: Tensor, streams: Mapping[str, Tensor]) -> Tensor:
        if "o_K" not in streams:
            return ratio(lr).clamp(max=self.cap)
        mu_K, pi_K = (_with_rest(streams[name].exp()) for name in ("o_K", "p_K"))
        distance = (mu_K - pi_K).abs().sum(-1) / 2
        if self.kind == "kl":
            distance = (mu_K * (mu_K / pi_K).log()).sum(-1)
        return self.held(lr, advantage * lr, distance)


def _with_rest(p_K: Tensor) -> Tensor:
    """[n, K + 1] probabilities, with that of all other symbols."""
    rest = (1 - p_K.sum(-1, keepdim=True)).clamp(min=1e-8)
    return torch.cat((p_K, rest), -1)


@dataclass(frozen=True, slots=True)
class SoftGate:
    """4 s (1 - s) r with s = sigmoid(tau (r - 1)); tau is tp where A > 0, else tn. SAPO, arXiv
    2511.20347."""

    tp: float = 1.0
    tn: float = 1.05

    def __call__(self, lr: Tensor, advantage: Tensor, streams: Mapping[str, Tensor]) -> Tensor:
        r = ratio(lr)
        s = torch.where(advantage > 0, self.tp * (r - 1), self.tn * (r - 1)).sigmoid()
        return 4 * s * (1 - s) * r


@dataclass(frozen=True, slots=True)
class ClipLog:
    """lr held below hi where A >= 0 and above -lo elsewhere: what GMPO (arXiv 2507.20673) does to
    each token before it pools them. For `Gate.pre`: gives log-ratios, not factors."""

    lo: float = 0.4
    hi: float = 0.4

    def __call__(self, lr: Tensor, advantage: Tensor, streams: Mapping[str, Tensor]) -> Tensor:
        return torch.where(advantage >= 0, lr.clamp(max=self.hi), lr.clamp(min=-self.lo))


@dataclass(frozen=True, slots=True)
class VespoWeight:
    """r^k e^{c (1 - r)} with (k, c) by the sign of A, pooled as a row sum. VESPO, 2602.10693."""

    positive: tuple[float, float] = (2.0, 3.0)
    negative: tuple[float, float] = (3.0, 2.0)

    def __call__(self, lr: Tensor, advantage: Tensor, streams: Mapping[str, Tensor]) -> Tensor:
        lr = lr.clamp(-LOG_LIMIT, LOG_LIMIT)
        up, down = (c * (1 - lr.exp()) + k * lr for k, c in (self.positive, self.negative))
        return torch.where(advantage >= 0, up, down).exp()


@dataclass(frozen=True, slots=True)
class OffPolicyMask:
    """0 where A < 0 and -lr > delta, else 1: no lesson from failures that the policy has moved away
    from. Pool as a row mean of p against b. DeepSeek-V3.2, arXiv 2512.02556."""

    delta: float = 0.1

    def __call__(self, lr: Tensor, advantage: Tensor, streams: Mapping[str, Tensor]) -> Tensor:
        return (~((advantage < 0) & (-lr > self.delta))).double()
