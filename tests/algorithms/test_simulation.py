"""The simulation of a run's time, against what can be calculated."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agentrl.algorithms.simulation import Simulation, Workload, lognormal

# One group of two calls of 10 tokens, 0.1 s each: sampled in 1 s, trained in 1 s.
PLAIN: dict[str, Any] = {
    "groups": 1, "group_size": 2, "slots": 2, "calls": 1.0, "tokens": 10.0, "decode": 0.1,
    "update": 1.0,
}  # fmt: skip


def seconds(ahead: float = 0.0, *, in_flight: bool = False, **changed: Any) -> float:
    return Simulation(Workload(**(PLAIN | changed)), ahead, in_flight=in_flight).run().seconds


@pytest.mark.parametrize(
    ("expected", "changed"),
    [
        (2.0, {}),
        (3.0, {"slots": 1}),  # one after the other
        (2.2, {"prompt": 0.1}),
        (2.1, {"prompt": 0.1, "engines": 2}),
        (2.4, {"per_call": 0.02}),
        (2.2, {"per_call": 0.02, "engines": 2}),
        (3.5, {"publish": 1.5}),
        (4.5, {"calls": 2.0, "tool": 1.5}),
        (1.0, {"ahead": 1.0, "in_flight": True}),
        (2.0, {"ahead": 1.0}),  # nothing runs while it is drained
        (2.0, {"ahead": 1.0, "in_flight": True, "update": 2.0}),
        (1.5, {"ahead": 1.0, "in_flight": True, "publish": 0.5}),
        (1.0, {"ahead": 4.0, "in_flight": True}),  # no slot for more
    ],
)
def test_a_step_takes_what_can_be_calculated(expected: float, changed: dict[str, Any]) -> None:
    assert seconds(**changed) == pytest.approx(expected)


def test_idle_times_are_shares_of_the_run() -> None:
    found = Simulation(Workload(**PLAIN), 0.0, in_flight=False).run()
    assert (found.sampler_idle, found.learner_idle) == pytest.approx((0.5, 0.5))
    found = Simulation(Workload(**PLAIN), 1.0, in_flight=True).run(100)
    assert found.sampler_idle < 0.02
    assert found.learner_idle < 0.02
    assert (found.max_lag, found.too_old) == (1, 0.0)


@settings(max_examples=25, deadline=None)
@given(
    ahead=st.sampled_from([0.0, 0.5, 1.0, 4.0]),
    in_flight=st.booleans(),
    seed=st.integers(0, 10**6),
    tool=st.floats(0.0, 5.0),
    update=st.floats(0.01, 5.0),
    slots=st.integers(1, 40),
)
def test_groups_in_the_requested_order_keep_the_bound(
    ahead: float, in_flight: bool, seed: int, tool: float, update: float, slots: int
) -> None:
    work = Workload(
        groups=4, group_size=3, slots=slots, calls=2.0, tokens=20.0, token_sigma=1.0, tool=tool,
        tool_sigma=2.0, decode=0.01, per_call=0.001, update=update,
    )  # fmt: skip
    run = Simulation(work, ahead, in_flight=in_flight, seed=seed)
    assert run.run(12).too_old == 0.0
    assert len(run.committed) == 12


def test_the_mean_of_what_is_drawn_is_the_one_given() -> None:
    drawn = [lognormal(3.0, 0.8, "x", n) for n in range(4000)]
    assert sum(drawn) / len(drawn) == pytest.approx(3.0, rel=0.05)
    assert drawn == [lognormal(3.0, 0.8, "x", n) for n in range(4000)]
    assert lognormal(3.0, 0.0, 1) == 3.0
