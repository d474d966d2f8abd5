"""Critics of calls by hand."""

from __future__ import annotations

from agentrl.algorithms.credit.calls import CallRewards
from agentrl.algorithms.credit.core import CriticValues
from agentrl.algorithms.presets.calls import BiLevelGae, HiperGae
from tests.algorithms.credit.test_calls import near, steps
from tests.algorithms.worlds import NAN, Call, Play, calls_without_tokens, world


def test_bi_level_gae() -> None:
    """D8."""
    calls = [Call(tokens=2, rewards={"p": 0.5}), Call(tokens=2, rewards={"p": 1.0})]
    batch = world(Play(calls), values=[0.1, 0.2, 0.3, 0.4])
    near(BiLevelGae(CriticValues(), "transition:p")(batch), [1.35, 1.25, 0.7, 0.6])


def test_a_call_without_reward_ends_its_turn_all_the_same() -> None:
    """RAGEN's own code finds turns by non-zero rewards and merges the others."""
    calls = [Call(tokens=2, rewards={"p": 0.0}), Call(tokens=2, rewards={"p": 1.0})]
    batch = world(Play(calls), values=[0.1, 0.2, 0.3, 0.4])
    near(BiLevelGae(CriticValues(), "transition:p")(batch), [0.85, 0.75, 0.7, 0.6])


def test_calls_without_tokens_are_no_decisions_of_a_critic() -> None:
    """What such a call received counts for the one before, and it is in no statistic."""
    bare, joined, other, values = calls_without_tokens()
    worlds = world(bare, other, values=values), world(joined, other, values=values)
    credit = BiLevelGae(CriticValues(), "transition:p", 1.0)
    near(credit(worlds[0]), credit(worlds[1]).tolist())


def test_hiper() -> None:
    """D20."""
    high, low = [0.5, NAN, 0.6], [0.4, 0.5, 0.7]
    batch = world(Play(steps(0, 0, 1, high=high, low=low)))
    parts = {
        part: HiperGae(
            CallRewards("transition:high"), CallRewards("transition:low"), part, "transition:p", 0.9
        )(batch)
        for part in ("high", "low")
    }
    near(parts["low"], [0.086, 0.04, 0.3])
    near(parts["high"], [0.31, NAN, 0.4])


def test_a_planner_begins_segments_and_takes_no_time() -> None:
    """As D20, where the subgoals are calls of their own and a third role looks on."""
    one = {"p": 0.0}
    calls = [
        Call(role="planner", rewards=one | {"high": 0.5}),
        Call(rewards=one | {"low": 0.4}),
        Call(rewards=one | {"low": 0.5}),
        Call(role="planner", rewards=one | {"high": 0.6}),
        Call(rewards={"low": 0.7}),
        Call(role="judge", rewards={"p": 1.0}),
    ]
    batch = world(Play(calls))
    high, low = CallRewards("transition:high"), CallRewards("transition:low")
    near(HiperGae(high, low, "low", "transition:p", 0.9)(batch), [NAN, 0.086, 0.04, NAN, 0.3, NAN])
    near(HiperGae(high, low, "high", "transition:p", 0.9)(batch), [0.31, NAN, NAN, 0.4, NAN, NAN])
