"""Gates by hand."""

from __future__ import annotations

from math import inf, log
from typing import Literal

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from agentrl.algorithms.credit.core import GroupRelative
from agentrl.algorithms.objective.ratios import LogProbs
from agentrl.algorithms.presets.trust_regions import (
    DivergenceGate,
    NonzeroVarianceReward,
    OffPolicyMask,
    SoftGate,
    TopKDivergenceGate,
    VespoWeight,
)
from tests.algorithms.credit.test_credit import NAN, f2
from tests.algorithms.credit.test_credit import near as credit_near
from tests.algorithms.credit.test_laws import are_one_on_policy, law
from tests.algorithms.objective.test_ratios import RHO, SIGN, near, of_candidates, stay_finite, top


def test_vespo_shapes() -> None:
    lr = torch.tensor([0.5, 1.0, 2.0]).double().log()
    assert near(VespoWeight()(lr, torch.ones(3), {}), [1.120422, 1, 0.199148])
    assert near(VespoWeight()(lr, -torch.ones(3), {})[1:], [1, 8 * float(torch.tensor(-2.0).exp())])


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
    logprobs = LogProbs(b + log(1.5), b, b)
    lr, up = logprobs.current - b, torch.ones(1)
    assert near(DivergenceGate(kind, bound, bound)(lr, up, logprobs), [kept])
    assert near(DivergenceGate(kind, bound, bound)(lr, -up, logprobs), [1.5])


def test_divergence_bounds_both_directions_and_caps_the_ratio() -> None:
    b = torch.tensor([0.6, 0.01, 0.6]).log()
    p = torch.tensor([0.3, 0.15, 0.3]).log()
    advantage = torch.tensor([-1.0, 1.0, 1.0])
    factors = DivergenceGate("tv", 0.2, 0.2, 10.0)(p - b, advantage, LogProbs(p, b, b))
    assert near(factors, [0, 10, 0.5])


@pytest.mark.parametrize(("kind", "distance"), [("tv", 0.1), ("kl", 0.040078)])
def test_top_k_divergence_counts_the_rest_as_one_symbol(
    kind: Literal["tv", "kl"], distance: float
) -> None:
    # The rest has .1 and .2.
    logprobs, up = top((0.6, 0.3), (0.5, 0.3)), torch.ones(1).double()
    lr = logprobs.current - logprobs.old
    for bound, factor in ((distance + 1e-6, 0.5 / 0.6), (distance - 1e-6, 0.0)):
        gate = TopKDivergenceGate(kind, bound, bound, k=2)
        assert near(gate(lr, -up, logprobs), [factor])
        assert near(gate(lr, up, logprobs), [0.5 / 0.6])  # back to where it came from


def test_top_k_divergence_sees_what_the_sampled_token_does_not() -> None:
    # The sampled token gained little; the two likeliest have changed places.
    logprobs, up = top((0.1, 0.6, 0.2), (0.11, 0.2, 0.6)), torch.ones(1).double()
    lr = logprobs.current - logprobs.old
    assert near(TopKDivergenceGate(k=3)(lr, up, logprobs), [0])
    assert near(DivergenceGate()(lr, up, logprobs), [1.1])


def test_top_k_divergence_of_all_symbols_is_exact() -> None:
    draw = torch.Generator().manual_seed(0)
    logits = torch.randn(2, 50, 7, generator=draw, dtype=torch.float64)
    o_K, p_K = logits.log_softmax(-1)
    lr, sign = (p_K - o_K)[:, 0], torch.randn(50, generator=draw).double()
    tv, kl = (o_K.exp() - p_K.exp()).abs().sum(-1) / 2, (o_K.exp() * (o_K - p_K)).sum(-1)
    kinds: list[tuple[Literal["tv", "kl"], Tensor]] = [("tv", tv), ("kl", kl)]
    for kind, distance in kinds:
        far = (distance > 0.3) & (sign * lr > 0)
        gate = TopKDivergenceGate(kind, 0.3, 0.3, inf, 7)
        assert near(gate(lr, sign, of_candidates(o_K, p_K)), (lr.exp() * ~far).tolist())


def test_fewer_symbols_never_see_a_larger_divergence() -> None:
    draw = torch.Generator().manual_seed(1)
    logits = 2 * torch.randn(2, 200, 9, generator=draw, dtype=torch.float64)
    o_K, p_K = logits.log_softmax(-1)
    lr = (p_K - o_K)[:, 0]
    kinds: tuple[Literal["tv", "kl"], ...] = ("tv", "kl")
    for kind in kinds:
        before = torch.zeros(200, dtype=torch.bool)
        for k in range(1, 10):
            gate = TopKDivergenceGate(kind, 0.2, 0.2, k=k)
            dropped = gate(lr, lr, of_candidates(o_K[:, :k], p_K[:, :k])) == 0
            assert not (before & ~dropped).any()
            before = dropped


def test_factors() -> None:
    soft = SoftGate()(RHO.log(), SIGN, {})
    assert near(soft, [1.410022, 0.470007, 1.40121, 0.46707, 0.630445, 1])
    assert near(OffPolicyMask(0.1)(RHO.log(), SIGN, {}), [1, 1, 1, 0, 1, 1])


def test_extreme_ratios_stay_finite() -> None:
    divergence = DivergenceGate("tv"), DivergenceGate("kl")
    stay_finite([SoftGate(), VespoWeight(), OffPolicyMask(), *divergence])


@law
@given(st.lists(st.tuples(st.floats(-20, 0), st.floats(-3, 3)), min_size=1, max_size=8))
def test_every_gate_is_one_on_policy(tokens: list[tuple[float, float]]) -> None:
    divergence = DivergenceGate("tv", 0, 0, 1), DivergenceGate("kl", 0, 0, 1)
    are_one_on_policy([SoftGate(), VespoWeight(), OffPolicyMask(0), *divergence], tokens)


@pytest.mark.parametrize(("ddof", "first", "other"), [(0, 1.732051, -0.57735), (1, 1.5, -0.5)])
def test_batch_deviation_without_flat_groups(ddof: int, first: float, other: float) -> None:
    scale = GroupRelative(NonzeroVarianceReward(), norm="std", norm_by=("all",), ddof=ddof, eps=0.0)
    assert credit_near(scale(f2()), [first, other, other, other, NAN, NAN])
