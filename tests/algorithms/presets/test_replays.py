"""Credit of branching rollouts by hand."""

from __future__ import annotations

import pytest

from agentrl.algorithms.credit.core import GroupRelative
from agentrl.algorithms.presets.replays import BranchAdvantage
from tests.algorithms.credit.test_calls import near
from tests.algorithms.worlds import Call, Play, world


def test_tree_rl() -> None:
    """D18."""
    plays = [
        Play([Call(node=node), Call()], outcome=outcome)
        for node, outcome in [("n1", 1.0), ("n1", 0.0), ("n2", 0.0), ("n2", 0.0)]
    ]
    credit = BranchAdvantage()(world(*plays))
    near(credit[::2], [0.353553, 0.353553, -0.353553, -0.353553])
    assert credit[1].item() == pytest.approx(1.25)
    near(BranchAdvantage(how="parent")(world(*plays))[:2], [0.25, 0.5])


def test_c3() -> None:
    """D15: three samples of one call, of which two rollouts repeat the call before."""
    first = Call(node="a", prompt="p")
    again = Call(node="a", prompt="p", tokens=0, repeats=True)
    ends = [Call(node=f"a{i}", prompt="q") for i in range(3)]
    plays = [
        Play([first if i == 0 else again, end], outcome=outcome)
        for i, (end, outcome) in enumerate(zip(ends, (1.0, 0.0, 0.5), strict=True))
    ]
    credit = GroupRelative(BranchAdvantage(how="siblings"), base="none")(world(*plays))
    near(credit, [0, 0.75, -0.75, 0])


def test_monte_carlo_step_values() -> None:
    """D16: A = V(s') - V(s) where V(s) is the mean of two fresh continuations, .25, and V(s') that
    of the rollout and its own continuation, .75."""

    def again(*nodes: str) -> list[Call]:
        return [Call(node=node, prompt=node[:-1], tokens=0, repeats=True) for node in nodes]

    def calls(*nodes: str) -> list[Call]:
        return [Call(node=node, prompt=node[:-1]) for node in nodes]

    plays = [
        Play(calls("a", "aa", "aaa"), outcome=1.0),
        Play(again("a") + calls("ab"), outcome=0.5),
        Play(again("a") + calls("ac"), outcome=0.0),
        Play(again("a", "aa") + calls("aab"), outcome=0.5),
    ]
    batch = world(*plays)
    credit = BranchAdvantage(how="siblings")(batch)
    near(credit, [0, 0.5, 0.5, 0, 0.125, 0, -0.625, 0, 0.5, -0.5])


def test_a_call_that_was_sampled_twice_counts_twice() -> None:
    """Of three samples of one prompt two are the same: its value is compared with 1 and 0."""
    samples = [("a", 1.0), ("a", 1.0), ("b", 0.0)]
    plays = [Play([Call(node=node, prompt="p")], outcome=x) for node, x in samples]
    near(BranchAdvantage(how="siblings")(world(*plays)), [0.5, 0.5, -1.0])


def test_a_rollout_without_its_reward_is_missing_not_zero() -> None:
    lost, whole = Play([Call("s")] * 2), [Play([Call("s")], outcome=o) for o in (1.0, 0.0)]
    credit = GroupRelative(BranchAdvantage(), base="none")
    assert credit(world(lost, *whole))[:2].isnan().all()
    near(credit(world(lost, *whole))[2:], credit(world(*whole)).tolist())


def test_empty_batches_have_no_credit() -> None:
    empty = world(Play([], outcome=1.0), Play([Call(tokens=0)], outcome=0.0))
    assert GroupRelative(BranchAdvantage())(empty).shape == (0,)
