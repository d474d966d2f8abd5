"""More modifiers that correct the mismatch of sampler and trainer: by rows, and for failures."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from agentrl.algorithms.objective.core import Algo, Gate
from agentrl.algorithms.objective.ratios import InRange, LogProbs, RatioInRange, Truncate
from agentrl.algorithms.presets.corrections import with_gates
from agentrl.algorithms.presets.declare import Cap, Num, modifier


@dataclass(frozen=True, slots=True)
class OffPolicyMask:
    """0 if A < 0 and -lr > delta, else 1: masks failures that the policy has moved away from. Pool
    lr as a row mean of p against b. DeepSeek-V3.2, arXiv 2512.02556."""

    delta: float = 0.1
    is_mask: ClassVar[bool] = True

    def __call__(self, lr: Tensor, advantage: Tensor, logprobs: LogProbs) -> Tensor:
        return (~((advantage < 0) & (-lr > self.delta))).double()


@modifier("seq-tis")
def seq_tis(algo: Algo, *, seq_tis_cap: Cap = 2.0) -> Algo:
    """Truncated product of a row's weights. verl `rollout_corr_helper`."""
    return with_gates(algo, Gate(Truncate(0.0, seq_tis_cap), "old", "sampler", "row", "sum"))


@modifier("mis")
def mis(algo: Algo, *, mis_cap: Cap = 3.0) -> Algo:
    """Drops rows whose product of weights is above the cap. TRL `sequence_mask`."""
    return with_gates(algo, Gate(RatioInRange(0.0, mis_cap), "old", "sampler", "row", "sum"))


@modifier("seq-mask-tis", prefix="seq_mask_")
def seq_mask_tis(algo: Algo, *, low: Num = 0.99, high: Cap = 1.01, cap: Cap = 2.0) -> Algo:
    """TIS within rows whose geometric mean weight is near 1. OpenRLHF `seq-mask-tis`."""
    mask = Gate(InRange(low, high), "old", "sampler", "row")
    return with_gates(algo, Gate(Truncate(0.0, cap), "old", "sampler"), mask)


@modifier("opsm")
def opsm(algo: Algo, *, opsm_delta: Num = 0.1) -> Algo:
    """Drops failed rows that the policy has moved away from. arXiv 2512.02556."""
    return with_gates(algo, Gate(OffPolicyMask(opsm_delta), "current", "sampler", "row"))
