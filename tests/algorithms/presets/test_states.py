"""Calls in the same state: worked numbers, small worlds, and means drawn to wider ones."""

from __future__ import annotations

import random
from statistics import fmean

import pytest
import torch
from torch import Tensor

from agentrl.algorithms.credit.calls import CallRewards, StepGae
from agentrl.algorithms.credit.states import mean_by
from agentrl.algorithms.objective.core import compute_advantages
from agentrl.algorithms.presets.registry import make
from agentrl.algorithms.presets.states import reliability, variance_components
from tests.algorithms.credit.test_calls import (
    near,
)
from tests.algorithms.presets.limits import binary
from tests.algorithms.worlds import NAN, Call, Play, world


def test_a_cut_before_any_reward_is_worth_the_last_value() -> None:
    """The second state was seen by the other rollout, which came to 1 from there; the third by
    nobody."""
    other = Play([Call("s"), Call("t")], outcome=1.0)
    known = [Call("s", rewards={"v": 1.0}), Call("t", rewards={"v": 1.0})]
    lost = Play([*known, Call("u", truncated=True)])
    credit = StepGae(CallRewards("transition:v"), "outcome", 1.0, 1.0)
    near(credit(world(lost, other))[:3], [0.0, 0.0, NAN])
    won = Play(lost.calls, outcome=0.5)
    near(credit(world(won, other))[:3], [-0.5, -0.5, 0.0])


# -- batch TD --------------------------------------------------------------------------------------


def test_batch_td_is_unbiased_where_states_show_what_matters() -> None:
    """All groups of three rollouts; how often the action was 1 decides, and is seen."""
    names = ["rloo", "batch-td"]
    exact, ours = binary(
        names, lambda path: float(sum(path) >= 2), lambda path: (len(path), sum(path)), 3, 3
    )
    assert torch.allclose(ours.mean(0), exact.mean(0), atol=0.012)  # by how far actions seem missed
    assert ours.var(0).sum() < 0.9 * exact.var(0).sum()


def test_batch_td_is_no_worse_where_states_show_nothing() -> None:
    exact, ours = binary(["rloo", "batch-td"], lambda path: float(sum(path) >= 2), len, 3, 3)
    assert torch.allclose(ours.mean(0), exact.mean(0), atol=1e-3)
    assert ours.var(0).sum() <= exact.var(0).sum()


def test_batch_td_knows_how_late_it_is() -> None:
    """Three steps lead to the goal and six calls may be made, each with a remark, so that no
    history occurs twice. After three calls at the start only a step can still win, once in four."""
    dice, plays, calls = random.Random(0), list[Play](), list[tuple[int, int, int]]()
    for _ in range(256):
        place, said = 0, list[Call]()
        while len(said) < 6 and place < 3:
            step = dice.randrange(2)
            calls.append((len(said), place, step))
            said.append(Call(state=place, node=f"{place}/{step}/{dice.randrange(9)}"))
            place += step
        plays.append(Play(said, float(place == 3)))
    ours = compute_advantages(make("batch-td", {}), world(*plays)).tolist()
    stay, go = (
        fmean(a for a, at in zip(ours, calls, strict=True) if at == (3, 0, step)) for step in (0, 1)
    )
    assert 0.15 < go - stay < 0.35


def test_batch_td_credits_a_decision_that_states_do_not_show() -> None:
    """Sixteen rollouts of six calls of four actions, of which the third alone decides."""
    dice = random.Random(0)
    done = [[dice.randrange(4) for _ in range(6)] for _ in range(16)]
    plays = [
        Play([Call(state=n, node=f"{n}/{a}") for n, a in enumerate(path)], float(path[2] == 1))
        for path in done
    ]
    ours, broadcast = (
        compute_advantages(make(name, {}), world(*plays)).view(16, 6)
        for name in ("batch-td", "rloo")
    )
    right = torch.tensor([path[2] == 1 for path in done])
    assert ours[right, 2].mean() - ours[~right, 2].mean() > 0.9
    idle = [0, 1, 3, 4, 5]
    assert ours[:, idle].square().mean() < 0.5 * broadcast[:, idle].square().mean()


# -- components of variance ------------------------------------------------------------------------


def components(x: Tensor, wide: Tensor, narrow: Tensor) -> tuple[float, float]:
    within, between = variance_components(x, wide, narrow)
    assert len(within) == len(between) == len(x)
    return float(within[0]), float(between[0])


def test_components_are_those_that_drew_the_numbers() -> None:
    draw = torch.Generator().manual_seed(0)
    wide = torch.arange(20_000) // 20
    narrow = torch.arange(20_000) // 4
    signal = 0.5 * torch.randn(5000, generator=draw, dtype=torch.float64)[narrow]
    x = wide + signal + 2 * torch.randn(20_000, generator=draw, dtype=torch.float64)
    within, between = components(x, wide, narrow)
    assert within == pytest.approx(4.0, rel=0.05)
    assert between == pytest.approx(0.25, abs=0.08)
    assert components(x - signal, wide, narrow)[1] < 0.08


def test_components_are_apart_for_parts_of_the_numbers() -> None:
    """In the first half narrow groups differ; in the second they do not."""
    draw = torch.Generator().manual_seed(0)
    wide, narrow = torch.arange(8000) // 16, torch.arange(8000) // 4
    x = torch.randn(8000, generator=draw, dtype=torch.float64)
    x[:4000] += torch.randn(2000, generator=draw, dtype=torch.float64)[narrow][:4000]
    by = torch.arange(8000) // 4000
    within, between = variance_components(x, wide, narrow, by)
    for half in (slice(0, 4000), slice(4000, 8000)):
        apart = components(x[half], wide[half], narrow[half])
        assert (float(within[half][0]), float(between[half][0])) == pytest.approx(apart)
    lowered = variance_components(x, wide, narrow, by, 3.0)[1]
    assert lowered[0] > 0.8
    assert lowered[-1] == 0
    alone = torch.cat([narrow[:4000], torch.arange(4000, 8000)])
    within = variance_components(x, wide, alone, by)[0]
    assert within[-1] == within[0] > 0  # the noise of the half where it is known


def test_components_of_unequal_sizes_are_those_of_the_textbook() -> None:
    wide, narrow = torch.tensor([0, 0, 0, 0, 0, 1, 1, 2]), torch.tensor([0, 0, 0, 1, 1, 0, 2, 5])
    x = torch.tensor([1.0, 2, 4, 8, 9, 3, 3.5, 100], dtype=torch.float64)
    # Within: 14/3 + 1/2 over 3 degrees of freedom. Between: (45.6333 + 0.125 - 2 within) / 3.4.
    assert components(x, wide, narrow) == pytest.approx((31 / 18, 12.445261), rel=1e-6)
    within, between = components(x[5:], wide[5:], narrow[5:])
    assert within == 0  # no group of two: nothing is known to be noise
    assert between > 0
    assert components(x[7:], wide[7:], narrow[7:]) == (0, 0)


def test_a_mean_of_more_is_more_reliable() -> None:
    count = torch.tensor([0.0, 1, 4])
    assert reliability(count, torch.tensor(1.0), torch.tensor(0.5)).tolist() == pytest.approx(
        [0, 1 / 3, 2 / 3]
    )
    assert reliability(count, torch.tensor(1.0), torch.tensor(0.0)).tolist() == [0, 0, 0]
    assert reliability(count, torch.tensor(0.0), torch.tensor(0.5)).tolist() == [0, 1, 1]


def test_a_mean_may_leave_out_what_is_its_own() -> None:
    x, ids = torch.tensor([1.0, 2, 6, 5], dtype=torch.float64), torch.tensor([0, 0, 0, 1])
    assert mean_by(x, ids)[0].tolist() == [3, 3, 3, 5]
    others, count = mean_by(x, ids, torch.tensor([0, 0, 1, 2]))
    assert others.tolist() == [6, 6, 1.5, 0]
    assert count.tolist() == [1, 1, 2, 0]
