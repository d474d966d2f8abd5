"""Calls in the same state by hand."""

from __future__ import annotations

from agentrl.algorithms.credit.call_credit import StepGae
from agentrl.algorithms.zoo.states.presets import PeerValues
from tests.algorithms.credit.test_call_credit import near
from tests.algorithms.worlds import NAN, Call, Play, world


def test_a_cut_before_any_reward_is_worth_what_the_last_known_value_says() -> None:
    """The second state was seen by the other rollout, which came to 1 from there; the third by
    nobody."""
    other = Play([Call("s"), Call("t")], outcome=1.0)
    lost = Play([Call("s"), Call("t"), Call("u", truncated=True)])
    credit = StepGae(PeerValues(), "outcome", 1.0, 1.0)
    near(credit(world(lost, other))[:3], [0.0, 0.0, NAN])
    won = Play(lost.calls, outcome=0.5)
    near(credit(world(won, other))[:3], [-0.5, -0.5, 0.0])
