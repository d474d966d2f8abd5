"""Modifiers that correct the mismatch of sampler and trainer by detached weights and masks."""

from __future__ import annotations

from dataclasses import replace
from typing import Literal

from agentrl.algorithms.objective.core import Algo, Gate
from agentrl.algorithms.objective.ratios import Ratio, RatioInRange, Truncate
from agentrl.algorithms.presets.declare import Cap, Num, modifier
from agentrl.errors import ConfigError


def with_gates(algo: Algo, *gates: Gate) -> Algo:
    return replace(algo, gates=algo.gates + gates)


@modifier("tis")
def tis(algo: Algo, *, tis_cap: Cap = 2.0) -> Algo:
    """Truncated weight per token of trainer against sampler. fengyao.notion.site/off-policy-rl."""
    return with_gates(algo, Gate(Truncate(0.0, tis_cap), "old", "sampler"))


@modifier("icepop")
def icepop(algo: Algo, *, icepop_low: Num = 0.5, icepop_high: Cap = 5.0) -> Algo:
    """Drops tokens whose weight of trainer against sampler is out of range. arXiv 2510.18855."""
    return with_gates(algo, Gate(RatioInRange(icepop_low, icepop_high), "old", "sampler"))


@modifier("decoupled")
def decoupled(algo: Algo, *, decoupled_old: Literal["exact", "versions"] = "exact") -> Algo:
    """The uncapped weight of old policy against sampler. arXiv 2110.00641, 2505.24298. versions:
    interpolates the old policy between sampler and current policy by the number of updates between
    them instead of computing it (A-3PO, arXiv 2512.06547)."""
    found = with_gates(algo, Gate(Ratio(), "old", "sampler"))
    return replace(found, old_from_versions=decoupled_old == "versions")


@modifier("behaviour")
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
