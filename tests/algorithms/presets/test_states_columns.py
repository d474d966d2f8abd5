"""Calls in the same state by hand."""

from __future__ import annotations

from itertools import product

import pytest
from torch import Tensor

from agentrl.algorithms.credit.calls import Returns, StepGae
from agentrl.algorithms.credit.core import GroupRelative, weighted_sum
from agentrl.algorithms.data.batch import Batch
from agentrl.algorithms.presets.states import PeerValues, SameStateRelative
from tests.algorithms.credit.test_calls import (
    SEEDS,
    a_missing_reward_is_not_zero,
    agree,
    an_empty_batch_has_no_credit,
    near,
)
from tests.algorithms.naive import naive_histories
from tests.algorithms.worlds import NAN, Call, Play, random_plays, world


def per_call(batch: Batch, x: Tensor) -> list[float]:
    """The number that all tokens of a call share."""
    out = []
    for call in range(len(batch.transitions)):
        values = set(x[batch.token_transition == call].nan_to_num(nan=1e9).tolist())
        assert len(values) == 1
        out.append(values.pop())
    return [NAN if value == 1e9 else value for value in out]


def test_a_cut_before_any_reward_is_worth_what_the_last_known_value_says() -> None:
    """The second state was seen by the other rollout, which came to 1 from there; the third by
    nobody."""
    other = Play([Call("s"), Call("t")], outcome=1.0)
    lost = Play([Call("s"), Call("t"), Call("u", truncated=True)])
    credit = StepGae(PeerValues(), "outcome", 1.0, 1.0)
    near(credit(world(lost, other))[:3], [0.0, 0.0, NAN])
    won = Play(lost.calls, outcome=0.5)
    near(credit(world(won, other))[:3], [-0.5, -0.5, 0.0])


def test_gigpo() -> None:
    """D4."""
    batch = world(
        Play([Call("s0"), Call("s1")], outcome=1.0), Play([Call("s0"), Call("s2")], outcome=0.0)
    )
    anchors = SameStateRelative(gamma=0.9)
    near(anchors(batch), [0.45, 0, -0.45, 0])
    near(GroupRelative(Returns(gamma=0.9), by=("group", "state"))(batch), [0.45, 0, -0.45, 0])
    near(weighted_sum((GroupRelative(), 1.0), (anchors, 1.0))(batch), [0.95, 0.5, -0.95, -0.5])


def test_hgpo() -> None:
    """D5: the final steps of three rollouts in the same state."""
    plays = [
        Play([Call(before), Call("s")], outcome=outcome)
        for before, outcome in [("a", 1.0), ("a", 0.0), ("c", 1.0)]
    ]
    advantage = SameStateRelative(gamma=1.0, depth=1)(world(*plays))
    near(advantage[1::2], [0.444444, -0.555556, 0.333333])


@pytest.mark.parametrize("seed", SEEDS)
def test_histories_against_loops(seed: int) -> None:
    plays = random_plays(seed)
    batch = world(*plays)
    for name, std in product(("outcome", "p"), (False, True)):
        reward = name if name == "outcome" else "transition:p"
        credit = SameStateRelative(reward, 0.9, 2, norm="std" if std else "none")
        expected = naive_histories(plays, name, 0.9, 2, std)
        agree("hgpo", per_call(batch, credit(batch)), expected)


def test_a_rollout_without_its_reward_is_missing_not_zero() -> None:
    a_missing_reward_is_not_zero(SameStateRelative())


def test_an_empty_batch_has_no_credit() -> None:
    an_empty_batch_has_no_credit(SameStateRelative(depth=2))
