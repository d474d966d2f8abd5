"""Modifiers for what sampler and trainer disagree about: detached weights and masks."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import ClassVar

from torch import Tensor

from agentrl.algorithms.objective.core import Algo, Gate
from agentrl.algorithms.objective.ratios import InRange, Ratio, RatioInRange, Truncate
from agentrl.algorithms.presets.registry import Cap, Num, modifier


def _with(algo: Algo, *gates: Gate) -> Algo:
    return replace(algo, gates=algo.gates + gates)


@modifier("tis")
def tis(algo: Algo, *, tis_cap: Cap = 2.0) -> Algo:
    """Truncated weight per token for sampler against trainer. fengyao.notion.site/off-policy-rl."""
    return _with(algo, Gate(Truncate(0.0, tis_cap), "o", "b"))


@modifier("seq-tis")
def seq_tis(algo: Algo, *, seq_tis_cap: Cap = 2.0) -> Algo:
    """Truncated product of a row's weights. verl `rollout_corr_helper`."""
    return _with(algo, Gate(Truncate(0.0, seq_tis_cap), "o", "b", "row", "sum"))


@modifier("icepop")
def icepop(algo: Algo, *, icepop_low: Num = 0.5, icepop_high: Cap = 5.0) -> Algo:
    """Tokens that sampler and trainer disagree about are dropped. arXiv 2510.18855."""
    return _with(algo, Gate(RatioInRange(icepop_low, icepop_high), "o", "b"))


@modifier("mis")
def mis(algo: Algo, *, mis_cap: Cap = 3.0) -> Algo:
    """Rows whose product of weights is above the cap are dropped. TRL `sequence_mask`."""
    return _with(algo, Gate(RatioInRange(0.0, mis_cap), "o", "b", "row", "sum"))


@modifier("seq-mask-tis")
def seq_mask_tis(
    algo: Algo,
    *,
    seq_mask_low: Num = 0.99,
    seq_mask_high: Cap = 1.01,
    seq_mask_cap: Cap = 2.0,
) -> Algo:
    """TIS within rows whose geometric mean weight is near 1. OpenRLHF `seq-mask-tis`."""
    mask = Gate(InRange(seq_mask_low, seq_mask_high), "o", "b", "row")
    return _with(algo, Gate(Truncate(0.0, seq_mask_cap), "o", "b"), mask)


@modifier("decoupled")
def decoupled(algo: Algo) -> Algo:
    """The uncapped weight of old policy against sampler. arXiv 2110.00641, 2505.24298."""
    return _with(algo, Gate(Ratio(), "o", "b"))


@modifier("opsm")
def opsm(algo: Algo, *, opsm_delta: Num = 0.1) -> Algo:
    """Failed rows that the policy has moved away from are dropped. arXiv 2512.02556."""
    return _with(algo, Gate(OffPolicyMask(opsm_delta), "p", "b", "row"))


@dataclass(frozen=True, slots=True)
class OffPolicyMask:
    """0 where A < 0 and -lr > delta, else 1: no lesson from failures that the policy has moved away
    from. Pool as a row mean of p against b. DeepSeek-V3.2, arXiv 2512.02556."""

    delta: float = 0.1
    is_mask: ClassVar[bool] = True

    def __call__(self, lr: Tensor, advantage: Tensor, streams: Mapping[str, Tensor]) -> Tensor:
        return (~((advantage < 0) & (-lr > self.delta))).double()
