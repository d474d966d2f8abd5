"""Rewards of team members: the catalogue's numbers, gates, and laws of coalition values."""

from __future__ import annotations

from itertools import chain, combinations
from math import isnan, nan
from random import Random

import pytest

from agentrl.algorithms.team_rewards import (
    Coalition,
    cross,
    difference,
    m_grpo_main,
    m_grpo_sub,
    maporl,
    maporl_incentives,
    marti,
    rounds,
    sage_challenger,
    sage_planner,
    sage_solver,
    shapley,
)
from tests import factories

GAME = {"1": 0.2, "12": 0.6, "13": 0.4, "23": 0.0, "123": 1.0}


def worth(coalition: Coalition) -> float:
    return GAME.get("".join(sorted(coalition)), 0.0)


def test_shapley_and_difference_of_the_catalogues_game() -> None:
    """E13."""
    assert list(shapley(worth, "123").values()) == pytest.approx([17 / 30, 8 / 30, 5 / 30])
    assert difference(worth, "123") == pytest.approx({"1": 1.0, "2": 0.6, "3": 0.4})


@pytest.mark.parametrize("n", [1, 3, 4, 6])
def test_shapley_shares_what_the_team_is_worth_and_leaves_a_dummy_nothing(n: int) -> None:
    draw, names = Random(n), [f"r{i}" for i in range(n)]
    every = chain.from_iterable(combinations(names, k) for k in range(n + 1))
    values = {frozenset(names_of): draw.random() for names_of in every}
    asked: list[Coalition] = []

    def value(coalition: Coalition) -> float:
        asked.append(coalition)
        return values[coalition - {"dummy"}] + 2 * ("r0" in coalition)

    roles = [*names, "dummy"]
    shares = shapley(value, roles, samples=20, seed=1)
    assert sum(shares.values()) == pytest.approx(value(frozenset(roles)) - value(frozenset()))
    assert shares["dummy"] == pytest.approx(0)
    assert len(asked) - 2 == len(set(asked))  # each coalition once: a value may be a rollout
    assert shapley(value, reversed(roles), samples=20, seed=1) == shares
    if len(roles) > 4:
        assert shapley(value, roles, samples=20, seed=2) != shares


def test_more_orders_than_can_be_taken_are_drawn() -> None:
    with pytest.raises(ValueError, match=r"5 roles can join in too many orders .*; set samples"):
        shapley(worth, "12345")


def test_marti_of_a_chain() -> None:
    """E9."""
    scores, stages = [0.0, 1.0, 1.0], [0, 1, 2]
    assert marti(scores, stages) == pytest.approx([0, 1.5, 1.25])
    assert marti(scores, stages, "quality") == pytest.approx([0, 1, 1.25])
    assert marti(scores, stages, beta=0.5) == pytest.approx([0.5, 2, 1.75])


def test_marti_of_a_debate_looks_at_all_agents_of_the_rounds_before() -> None:
    scores, stages = [1.0, 0.0, 1.0, 0.0], [0, 0, 1, 1]
    assert marti(scores, stages) == pytest.approx([1, 0, 1.25, -0.25])
    shaped = marti([nan, 1.0, 0.0], [0, 0, 1])
    assert isnan(shaped[0])
    assert shaped[1:] == pytest.approx([1.0, -0.5])


def test_maporl_weighs_later_rounds() -> None:
    """E8."""
    scores, stages = [0.4, 0.6, 0.8], [0, 1, 1]
    assert maporl(scores, stages)[0] == pytest.approx(0.55)
    assert maporl(scores, stages, 0.5) == pytest.approx([0.5, 0.6, 0.8])


def test_a_round_that_was_not_held_is_no_score() -> None:
    rewards = maporl([0.4, 0.6, -1.0, -1.0], [0, 0, 1, 1])
    assert rewards[:2] == [0.4, 0.6]
    assert all(map(isnan, rewards[2:]))


def test_maporl_pays_for_turning_to_what_is_right_and_for_turning_others() -> None:
    agents, stages = list("abc") * 3, [0, 0, 0, 1, 1, 1, 2, 2, 2]
    right = [1.0, 0.2, 0.0, 0.9, 1.0, 0.2, 0.4, 0.1, 0.8]
    weights = {"joined": 1.0, "alone": 10.0, "persuaded": 100.0, "provoked": 1000.0}

    def paid(scores: list[float]) -> list[float]:
        return maporl_incentives(scores, agents, stages, **weights)

    # The means of the others are, by round, 0.1, 0.6, 0.45 for a; 0.5, 0.55, 0.6 for b; and 0.6,
    # 0.95, 0.25 for c. So a turns the others to the right in the first round, and does not keep
    # them there in the second; c is wrong then, and what they turn to; in the third a and b leave
    # what the others said, and c joins it. What is half right tells nobody anything.
    assert paid(right) == [100, 0, 0, -1000, 0, -100, -10, -10, 1]
    # What was right wrong and the other way round: the same turns with the opposite sign.
    assert paid([1 - x for x in right]) == [-x for x in paid(right)]
    assert maporl_incentives(right, agents, stages) == [0.0] * 9


def test_turns_are_between_rounds_that_were_held() -> None:
    pay = {"joined": 1.0, "alone": 2.0}
    held = maporl_incentives([0.0, 1.0, -1.0, -1.0, 1.0, 1.0], "ababab", [0, 0, 1, 1, 2, 2], **pay)
    assert held[0] == held[1] == held[5] == 0
    assert all(map(isnan, held[2:4]))
    assert held[4] == 1.0
    assert isnan(maporl_incentives([nan, 1.0], "ab", [0, 0], **pay)[0])


def test_an_answer_is_worth_the_mean_of_the_joint_answers_it_is_in() -> None:
    """E7, cross: the catalogue's returns as those of two agents' two answers each."""
    returns = {("x", "u"): 1.0, ("x", "v"): 0.0, ("y", "u"): 0.5, ("y", "v"): 0.5}
    answers = {"one": ["x", "y"], "two": ["u", "v"]}
    found = cross(lambda joint: returns[joint["one"], joint["two"]], answers)
    assert found == {"one": [0.5, 0.5], "two": [0.75, 0.25]}
    returns["x", "u"] = nan
    found = cross(lambda joint: returns[joint["one"], joint["two"]], answers)
    assert found == {"one": [0.0, 0.5], "two": [0.5, 0.25]}
    returns["y", "u"] = nan
    assert isnan(cross(lambda joint: returns[joint["one"], joint["two"]], answers)["two"][0])


def test_a_round_is_the_call_number_of_a_role() -> None:
    calls = [
        factories.call(str(i), index=i, logprob=0.0, role=role) for i, role in enumerate("abbab")
    ]
    assert rounds(calls) == [0, 0, 1, 1, 2]


def test_a_challenger_earns_difficulty_behind_both_gates() -> None:
    """E2. Without the gates an unsolvable question would earn the most."""
    assert sage_challenger(0.8, 1.0, 0.25, valid=True) == pytest.approx(0.85)
    assert sage_challenger(0.6, 1.0, 0.25, valid=True) == pytest.approx(0.8)
    assert sage_challenger(0.8, 1.0, 0.0, valid=False) == pytest.approx(0.9)
    assert sage_challenger(0.7, 1.0, 0.0, valid=True) == pytest.approx(0.9)


def test_a_plan_too_bad_to_follow_is_dropped() -> None:
    assert sage_planner(0.5, 1.0) == pytest.approx(0.55)
    assert sage_solver(0.3, 1.0, 1.0) == pytest.approx(0.86)
    assert sage_solver(0.29, 1.0, 1.0) == pytest.approx(0.8)


def test_nothing_is_earned_without_the_format() -> None:
    """E10."""
    assert (m_grpo_main(1.0, 1.0), m_grpo_main(0.0, 1.0)) == (1.0, 0.0)
    assert m_grpo_sub(1.0, 0.0, 1.0) == pytest.approx(0.6)
    assert m_grpo_sub(0.0, 1.0, 1.0) == 0.0
