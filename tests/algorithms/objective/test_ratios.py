"""Gate functions on one set of ratios and signs."""

from __future__ import annotations

from collections.abc import Sequence
from math import inf, log

import pytest
import torch
from torch import Tensor

from agentrl.algorithms.objective.ratios import (
    Clip,
    GateFn,
    InRange,
    LogProbs,
    Ratio,
    RatioInRange,
    Truncate,
    TrustRegion,
)
from agentrl.algorithms.presets.trust_regions import (
    DivergenceGate,
    OffPolicyMask,
    SoftGate,
    VespoWeight,
)

RHO = torch.tensor([1.5, 0.5, 1.5, 0.5, 4.0, 1.0], dtype=torch.float64)
SIGN = torch.tensor([1.0, 1, -1, -1, -1, 1], dtype=torch.float64)


def near(values: Tensor, expected: Sequence[float]) -> bool:
    return values.tolist() == pytest.approx(list(expected), abs=5e-7)


@pytest.mark.parametrize(
    ("gate", "expected"),
    [
        (Ratio(), [1.5, 0.5, 1.5, 0.5, 4, 1]),
        (Clip(), [0, 0.5, 1.5, 0, 4, 1]),
        (Clip(dual=3), [0, 0.5, 1.5, 0, 0, 1]),
        (Clip(0.5, 0.5), [1.5, 0.5, 1.5, 0.5, 4, 1]),
        (TrustRegion(), [0, 1, 1, 0, 1, 1]),
        (TrustRegion(dual=3), [0, 1, 1, 0, 0, 1]),
        (Truncate(0, 2), [1.5, 0.5, 1.5, 0.5, 2, 1]),
        (Truncate(0.8, 1.28), [1.28, 0.8, 1.28, 0.8, 1.28, 1]),
        (RatioInRange(0.5, 2), [1.5, 0.5, 1.5, 0.5, 0, 1]),
        (InRange(0.6, 2), [1, 0, 1, 0, 0, 1]),
    ],
)
def test_factors(gate: GateFn, expected: list[float]) -> None:
    assert near(gate(RHO.log(), SIGN, {}), expected)


def test_clip_higher_keeps_what_the_upper_bound_allows() -> None:
    lr, up = torch.tensor([log(1.25)]).double(), torch.ones(1)
    assert near(Clip(0.2, 0.28)(lr, up, {}), [1.25])
    assert near(Clip(0.2, 0.2)(lr, up, {}), [0])


def test_no_advantage_is_bounded_like_a_good_one() -> None:
    assert near(TrustRegion()(RHO.log(), torch.zeros(6), {}), [0, 1, 0, 1, 0, 1])


def test_extreme_ratios_stay_finite() -> None:
    gates: list[GateFn] = [
        Ratio(), Clip(), Clip(0.2, inf), TrustRegion(), Truncate(), RatioInRange(0, inf),
        InRange(0, inf), SoftGate(), VespoWeight(), OffPolicyMask(), DivergenceGate("tv"),
        DivergenceGate("kl"),
    ]  # fmt: skip
    lr = torch.tensor([-1e6, 1e6]).double()
    b, p = torch.tensor([[0.0, -1e6], [-1e6, 0.0]]).double()
    logprobs = LogProbs(p, b, b)
    for gate in gates:
        for sign in (-1.0, 0.0, 1.0):
            assert gate(lr, torch.full((2,), sign), logprobs).isfinite().all(), gate


def test_gates_compare_and_print_by_their_settings() -> None:
    assert Clip(0.2, 0.28) == Clip(hi=0.28)
    assert "hi=0.28" in repr(Clip(0.2, 0.28))
