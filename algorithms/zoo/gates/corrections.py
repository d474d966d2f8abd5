"""Modifiers that correct the mismatch of sampler and trainer by detached weights and masks."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar, Literal

from torch import Tensor

from agentrl.algorithms.objective.core import Algo, Gate
from agentrl.algorithms.objective.ratios import InRange, LogProbs, Ratio, RatioInRange, Truncate
from agentrl.algorithms.presets.declare import Cap, Num, modifier
from agentrl.errors import ConfigError


def with_gates(algo: Algo, *gates: Gate) -> Algo:
    return replace(algo, gates=algo.gates + gates)


@modifier("tis", usual=True)
def tis(algo: Algo, *, tis_cap: Cap = 2.0) -> Algo:
    """Truncated weight per token of trainer against sampler. fengyao.notion.site/off-policy-rl."""
    return with_gates(algo, Gate(Truncate(0.0, tis_cap), "old", "sampler"))


@modifier("icepop", usual=True)
def icepop(algo: Algo, *, icepop_low: Num = 0.5, icepop_high: Cap = 5.0) -> Algo:
    """Drops tokens whose weight of trainer against sampler is out of range. arXiv 2510.18855."""
    return with_gates(algo, Gate(RatioInRange(icepop_low, icepop_high), "old", "sampler"))


@modifier("decoupled", usual=True)
def decoupled(algo: Algo, *, decoupled_old: Literal["exact", "versions"] = "exact") -> Algo:
    """The uncapped weight of old policy against sampler. arXiv 2110.00641, 2505.24298. versions:
    interpolates the old policy between sampler and current policy by the number of updates between
    them instead of computing it (A-3PO, arXiv 2512.06547)."""
    found = with_gates(algo, Gate(Ratio(), "old", "sampler"))
    return replace(found, old_from_versions=decoupled_old == "versions")


@modifier("behaviour", usual=True)
def behaviour(algo: Algo) -> Algo:
    """Takes ratios against the sampler instead of the old policy, so that clips are relative to the
    policy that sampled the tokens, however old it is (verl's bypass mode)."""
    if algo.symbols or not any((g.num, g.den) == ("current", "old") for g in algo.gates):
        raise ConfigError(
            "algorithm.preset: +behaviour changes token ratios against the old policy, which this "
            "preset does not have; remove it, or add +tis instead"
        )
    gates = (
        replace(g, den="sampler") if (g.num, g.den) == ("current", "old") else g for g in algo.gates
    )
    return replace(algo, gates=tuple(gates))


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
