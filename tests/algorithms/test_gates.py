"""Gate functions on one set of ratios and signs."""

from __future__ import annotations

from collections.abc import Sequence
from math import inf, log

import pytest
import torch
from torch import Tensor

from agentrl.algorithms.gates import (
    Band,
    Clip,
    Div,
    GateFn,
    Inside,
    Opsm,
    Ratio,
    Soft,
    Trunc,
    Trust,
    Vespo,
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
        (Trust(), [0, 1, 1, 0, 1, 1]),
        (Trust(dual=3), [0, 1, 1, 0, 0, 1]),
        (Trunc(0, 2), [1.5, 0.5, 1.5, 0.5, 2, 1]),
        (Trunc(0.8, 1.28), [1.28, 0.8, 1.28, 0.8, 1.28, 1]),
        (Band(0.5, 2), [1.5, 0.5, 1.5, 0.5, 0, 1]),
        (Inside(0.6, 2), [1, 0, 1, 0, 0, 1]),
        (Soft(), [1.410022, 0.470007, 1.40121, 0.46707, 0.630445, 1]),
        (Opsm(0.1), [1, 1, 1, 0, 1, 1]),
    ],
)
def test_factors(gate: GateFn, expected: list[float]) -> None:
    assert near(gate(RHO.log(), SIGN, {}), expected)


def test_clip_higher_keeps_what_the_upper_bound_allows() -> None:
    lr, up = torch.tensor([log(1.25)]).double(), torch.ones(1)
    assert near(Clip(0.2, 0.28)(lr, up, {}), [1.25])
    assert near(Clip(0.2, 0.2)(lr, up, {}), [0])


def test_no_advantage_is_bounded_like_a_good_one() -> None:
    assert near(Trust()(RHO.log(), torch.zeros(6), {}), [0, 1, 0, 1, 0, 1])


def test_vespo_shapes() -> None:
    lr = torch.tensor([0.5, 1.0, 2.0]).double().log()
    assert near(Vespo()(lr, torch.ones(3), {}), [1.120422, 1, 0.199148])
    assert near(Vespo()(lr, -torch.ones(3), {})[1:], [1, 8 * float(torch.tensor(-2.0).exp())])


@pytest.mark.parametrize(
    ("kind", "bound", "mu", "kept"),
    [
        ("tv", 0.15, 0.5, 0),
        ("tv", 0.15, 0.01, 1.5),
        ("tv", 0.2501, 0.5, 1.5),
        ("kl", 0.143, 0.5, 0),
        ("kl", 0.144, 0.5, 1.5),
        ("kl", 0.00095, 0.01, 0),
        ("kl", 0.00096, 0.01, 1.5),
    ],
)
def test_divergence_bounds_a_probability_not_its_ratio(
    kind: str, bound: float, mu: float, kept: float
) -> None:
    b = torch.tensor([mu]).double().log()
    streams = {"b": b, "p": b + log(1.5)}
    lr, up = streams["p"] - b, torch.ones(1)
    assert near(Div(kind, bound, bound)(lr, up, streams), [kept])
    assert near(Div(kind, bound, bound)(lr, -up, streams), [1.5])


def test_divergence_bounds_both_directions_and_caps_the_ratio() -> None:
    b = torch.tensor([0.6, 0.01, 0.6]).log()
    p = torch.tensor([0.3, 0.15, 0.3]).log()
    advantage = torch.tensor([-1.0, 1.0, 1.0])
    factors = Div("tv", 0.2, 0.2, 10.0)(p - b, advantage, {"b": b, "p": p})
    assert near(factors, [0, 10, 0.5])


def test_extreme_ratios_stay_finite() -> None:
    lr = torch.tensor([-1e6, 1e6]).double()
    streams = {"b": torch.tensor([0.0, -1e6]).double(), "p": torch.tensor([-1e6, 0.0]).double()}
    gates: list[GateFn] = [
        Ratio(), Clip(), Clip(0.2, inf), Trust(), Trunc(), Band(0, inf), Inside(0, inf), Soft(),
        Vespo(), Opsm(), Div("tv"), Div("kl"),
    ]  # fmt: skip
    for gate in gates:
        for sign in (-1.0, 0.0, 1.0):
            assert gate(lr, torch.full((2,), sign), streams).isfinite().all(), gate


def test_gates_compare_and_print_by_their_settings() -> None:
    assert Clip(0.2, 0.28) == Clip(hi=0.28)
    assert "hi=0.28" in repr(Clip(0.2, 0.28))
