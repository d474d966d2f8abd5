"""Process and result rewards, and what each way of mixing makes of them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec
import pytest
from torch import Tensor

from agentrl.algorithms.credit.core import GroupRelative, Whiten, weighted_sum
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


def test_prime() -> None:
    """D10, a token per call."""
    batch = world(play(1.0, 0.2, 0.4), play(0.0, -0.1, 0.1, 0.3))
    steps = of({"p": CALLS | {"base": "prime"}})
    outcome = GroupRelative(base="loo")
    near(weighted_sum((outcome, 1.0), (steps, 1.0))(batch), [1.4, 1.3, -1.6, -1.2, -1.0])
    scaled = of({"p": CALLS | {"base": "none", "norm": "prime", "gamma": 0.0}})
    near(scaled(batch), [1 / 3, 2 / 3, -1 / 6, 1 / 6, 0.5])


def test_prime_of_one_rollout_is_zero_not_infinite() -> None:
    assert of({"p": CALLS | {"base": "prime"}})(world(play(1.0, 0.2, 0.4))).tolist() == [0, 0]


def test_gdpo_mixes_advantages() -> None:
    """A17 before whitening, one token each."""
    plays = [
        Play([Call()], rewards={"r1": r1, "r2": r2}) for r1, r2 in [(1, 0), (0, 1), (0, 1), (0, 0)]
    ]
    mix = of({"r1": {"norm": "std"}, "r2": {"norm": "std"}})
    assert mix(world(*plays)).tolist() == pytest.approx(
        [0.633973, 0.366025, 0.366025, -1.366023], abs=1e-6
    )


def test_a_large_stream_drowns_others_unless_mixed_late() -> None:
    batch = world(play(1.0, 0.0), play(0.0, 100.0), play(0.0, 0.0))
    streams = {"outcome": {}, "p": CALLS}
    scaled = {name: stream | {"norm": "std"} for name, stream in streams.items()}
    near(of(scaled)(batch), [0.577350, 0.577350, -1.154701], 3e-6)
    near(of(streams, "rewards", norm="std")(batch), [-0.568625, 1.154657, -0.586032], 3e-6)


def test_each_way_discounts_as_it_says() -> None:
    batch = world(play(1.0, 0.0, 0.0), play(0.0, 0.0, 0.0))
    # As rewards, the outcome is what the last call received.
    near(of({"outcome": {}}, "rewards", gamma=0.5)(batch), [0.125, 0.625, -0.375, -0.375])
    # As advantages and returns, the compared outcome fades by the stream's own discount.
    for way in ("advantages", "returns"):
        near(of({"outcome": {"gamma": 0.5}}, way)(batch), [0.25, 0.5, -0.25, -0.5])
    near(of({"p": CALLS | {"gamma": 0.5, "base": "none"}})(world(play(NAN, 1, 1))), [1.5, 1])


def test_returns_share_one_scale() -> None:
    batch = world(play(1.0, 0.0), play(0.0, 2.0), play(0.0, 0.0))
    streams = {"outcome": {}, "p": CALLS | {"weight": 0.5}}
    # Centred outcome 2/3, -1/3, -1/3; centred process -1/3, 2/3, -1/3 after its weight.
    near(of(streams, "returns")(batch), [1 / 3, 1 / 3, -2 / 3])
    near(of(streams, "returns", norm="std")(batch), [0.577350, 0.577350, -1.154701], 3e-6)


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


def test_roles_are_streams_too() -> None:
    plays = [
        Play([Call(role="a"), Call(role="b")], tact={"a": a, "b": b}) for a, b in [(1, 0), (0, 0.5)]
    ]
    stream = {"tact": {"scope": "role", "by": ["group", "role"]}}
    near(of(stream)(world(*plays)), [0.5, -0.25, -0.5, 0.25])


def test_streams_go_under_any_credit() -> None:
    batch = world(play(1.0, 1.0), play(0.0, 0.0))
    whitened = Whiten(of({"outcome": {}, "p": CALLS}))(batch)
    near(whitened, [0.70710678, -0.70710678])
