"""DPPO: the trust region is on probabilities instead of their ratio. arXiv 2602.04879."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from agentrl.algorithms.credit.core import GroupRelative
from agentrl.algorithms.objective.core import Algo, Average, Gate
from agentrl.algorithms.objective.ratios import ratio
from agentrl.algorithms.presets.registry import Cap, Num, preset
from agentrl.config import Count


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

    @property
    def symbols(self) -> int:
        return self.k

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


@preset("dppo-tv")
def dppo_tv(
    reward: str, *, low: Num = 0.15, high: Num = 0.15, cap: Cap = 20.0, length: Count = 1024
) -> Algo:
    """Trust region on the change of probability instead of its ratio. arXiv 2602.04879."""
    gate = Gate(DivergenceGate("tv", low, high, cap), den="b")
    return Algo(GroupRelative(reward), (gate,), agg=Average(("row",), "const", length))


@preset("dppo-kl")
def dppo_kl(
    reward: str, *, low: Num = 0.05, high: Num = 0.05, cap: Cap = 20.0, length: Count = 1024
) -> Algo:
    """Trust region on the KL divergence of a token's probability. arXiv 2602.04879."""
    gate = Gate(DivergenceGate("kl", low, high, cap), den="b")
    return Algo(GroupRelative(reward), (gate,), agg=Average(("row",), "const", length))


@preset("dppo-topk")
def dppo_topk(
    reward: str,
    *,
    k: Count = 20,
    kind: Literal["tv", "kl"] = "tv",
    low: Num | None = None,
    high: Num | None = None,
    cap: Cap = 20.0,
    length: Count = 1024,
) -> Algo:
    """Trust region on how far the probabilities of the sampled and the likeliest tokens, k in all,
    and of the rest have moved from the old policy: total variation (0.15) or KL (0.05). Without
    minibatches or epochs nothing has moved. arXiv 2602.04879."""
    bound = 0.15 if kind == "tv" else 0.05
    down, up = (bound if given is None else given for given in (low, high))
    gate = Gate(TopKDivergenceGate(kind, down, up, cap, k))
    return Algo(GroupRelative(reward), (gate,), agg=Average(("row",), "const", length))
