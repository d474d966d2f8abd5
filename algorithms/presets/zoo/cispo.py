"""Ratios without PPO's clip: CISPO truncates, SAPO and VESPO smooth, MiniRL masks."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from agentrl.algorithms.credit.core import GroupRelative
from agentrl.algorithms.objective.core import Algo, Gate
from agentrl.algorithms.objective.ratios import LOG_LIMIT, Ratio, Truncate, TrustRegion, ratio
from agentrl.algorithms.presets.registry import TOKENS, Cap, Num, preset


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
class VespoWeight:
    """r^k e^{c (1 - r)} with (k, c) by the sign of A, pooled as a row sum. VESPO, 2602.10693."""

    positive: tuple[float, float] = (2.0, 3.0)
    negative: tuple[float, float] = (3.0, 2.0)

    def __call__(self, lr: Tensor, advantage: Tensor, streams: Mapping[str, Tensor]) -> Tensor:
        lr = lr.clamp(-LOG_LIMIT, LOG_LIMIT)
        up, down = (c * (1 - lr.exp()) + k * lr for k, c in (self.positive, self.negative))
        return torch.where(advantage >= 0, up, down).exp()


@preset("cispo")
def cispo(reward: str, *, low: Num = 0.0, cap: Cap = 5.0) -> Algo:
    """GRPO with ratios truncated instead of dropped; bounds are absolute. arXiv 2506.13585."""
    return Algo(GroupRelative(reward, norm="std"), (Gate(Truncate(low, cap)),), agg=TOKENS)


@preset("sapo")
def sapo(reward: str, *, tau_up: Num = 1.0, tau_down: Num = 1.05) -> Algo:
    """GRPO with a smooth gate around ratio 1. arXiv 2511.20347."""
    return Algo(GroupRelative(reward, norm="std"), (Gate(SoftGate(tau_up, tau_down)),))


@preset("vespo")
def vespo(reward: str) -> Algo:
    """GRPO with a smooth gate on the product of a row's ratios. arXiv 2602.10693."""
    return Algo(GroupRelative(reward, norm="std"), (Gate(VespoWeight(), by="row", how="sum"),))


@preset("minirl")
def minirl(reward: str, *, clip_low: Num = 0.2, clip_high: Num = 0.2) -> Algo:
    """Weight against the sampler, PPO's clip as a mask against the old policy. arXiv 2512.01374."""
    gates = (Gate(Ratio(), den="b"), Gate(TrustRegion(clip_low, clip_high)))
    return Algo(GroupRelative(reward), gates, agg=TOKENS)
