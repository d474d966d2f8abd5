"""Rewards of team members: the catalogue's numbers, gates, and laws of coalition values."""

from __future__ import annotations

from itertools import chain, combinations
from math import isnan, nan
from random import Random

import pytest

from agentrl.team_rewards import (
    Coalition,
    difference,
    m_grpo_main,
    m_grpo_sub,
    maporl,
    marti,
    rounds,
    sage_challenger,
    sage_planner,
    sage_solver,
    shapley,
)
from agentrl.types import Transition, float32, int32

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


def test_a_round_is_the_call_number_of_a_role() -> None:
    calls = [
        Transition(
            id=str(i), attempt="a", index=i, prompt=int32([1]), completion=int32([2]),
            logprobs=float32([0.0]), role=role,
        )
        for i, role in enumerate("abbab")
    ]  # fmt: skip
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
