"""Process and result rewards, and what each way of mixing makes of them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec
import pytest
from torch import Tensor

from agentrl.algorithms.presets.process import RewardStream, Way, mixed_credit, stream_advantage
from tests.algorithms.worlds import NAN, Call, Play, world


def near(values: Tensor, expected: Sequence[float], within: float = 5e-7) -> None:
    assert values.tolist() == pytest.approx(list(expected), abs=within, nan_ok=True)


def of(streams: dict[str, dict[str, Any]], way: Way = "advantages", **options: Any) -> Any:
    return mixed_credit(msgspec.convert(streams, dict[str, RewardStream]), way, **options)


def play(outcome: float, *process: float, **fields: Any) -> Play:
    calls = [Call(rewards={} if p != p else {"p": p}) for p in process]
    return Play(calls, outcome=outcome, **fields)


CALLS = {"scope": "transition"}


def test_prime_of_one_rollout_is_zero_not_infinite() -> None:
    assert of({"p": CALLS | {"base": "prime"}})(world(play(1.0, 0.2, 0.4))).tolist() == [0, 0]


def test_each_way_discounts_as_it_says() -> None:
    batch = world(play(1.0, 0.0, 0.0), play(0.0, 0.0, 0.0))
    # As rewards, the outcome is what the last call received.
    near(of({"outcome": {}}, "rewards", gamma=0.5)(batch), [0.125, 0.625, -0.375, -0.375])
    # As advantages and returns, the compared outcome fades by the stream's own discount.
    for way in ("advantages", "returns"):
        near(of({"outcome": {"gamma": 0.5}}, way)(batch), [0.25, 0.5, -0.25, -0.5])
    near(of({"p": CALLS | {"gamma": 0.5, "base": "none"}})(world(play(NAN, 1, 1))), [1.5, 1])


def test_gates() -> None:
    plays = [play(1.0, 1.0), play(1.0, 0.0), play(0.0, 1.0), play(0.0, 0.0), play(NAN, 0.5)]
    batch = world(*plays)
    for gate, expected in [
        ("none", [0.5, -0.5, 0.5, -0.5, 0]),
        ("agree", [0.5, 0, 0, -0.5, NAN]),
        ("positive", [0.5, -0.5, 0, -0.5, NAN]),
    ]:
        streams = msgspec.convert(
            {"outcome": {}, "p": CALLS | {"gate": gate}}, dict[str, RewardStream]
        )
        near(stream_advantage("p", streams)(batch), expected)


def test_clipping() -> None:
    batch = world(play(0.0, 4.0), play(0.0, 0.0))
    near(of({"p": CALLS | {"clip": 0.5}})(batch), [0.5, -0.5])


def test_potentials_leave_group_relative_sums_unchanged() -> None:
    """D13: the shaping of a rollout adds up to minus the potential of its start."""
    plays = [
        Play([Call(rewards={"phi": phi}) for phi in potentials], outcome=outcome)
        for potentials, outcome in [([0.2, 0.5, 0.9], 1.0), ([0.2, 0.7], 0.0)]
    ]
    shaping = of({"phi": CALLS | {"potential": True, "base": "none"}})(world(*plays))
    near(shaping, [-0.2, -0.5, -0.9, -0.2, -0.7])


def test_what_a_stream_misses_is_not_zero() -> None:
    batch = world(play(1.0, NAN), play(0.0, 1.0), play(0.0, 0.0), play(NAN, NAN))
    near(of({"p": CALLS})(batch), [NAN, 0.5, -0.5, NAN])
    near(of({"outcome": {}, "p": CALLS})(batch), [2 / 3, 1 / 6, -5 / 6, NAN])
    near(
        of({"p": CALLS | {"gamma": 0.0}})(world(play(0.0, NAN, 1.0), play(0.0, 3.0))), [NAN, -1, 1]
    )
