"""Weights and outliers, against numbers worked out by hand."""

from __future__ import annotations

import math
import random

import pytest

from agentrl.live.labels.weighing import Ledger, weighted
from agentrl.live.records.marks import Mark

WEIGHTS = {"feedback": 1.0, "verifier": 1.0, "next_message": 2.0}


def test_missing_signals_are_missing_and_those_without_weight_do_not_count():
    assert weighted({"feedback": 1.0, "next_message": 0.25}, WEIGHTS) == 0.5
    assert weighted({"verifier": 0.0, "bought": 1.0}, WEIGHTS) == 0.0
    assert math.isnan(weighted({"bought": 1.0}, WEIGHTS))
    assert math.isnan(weighted({}, WEIGHTS))
    assert math.isnan(weighted({"feedback": 1.0}, {"feedback": 0.0}))


def population(outcomes: dict[str, list[float]], votes: dict[str, list[float]]) -> Ledger:
    """Users with the outcomes of their sessions by the verifier, and their votes on the first."""
    ledger = Ledger(0, WEIGHTS)
    for user, values in outcomes.items():
        for n, value in enumerate(values):
            given = votes.get(user, [])
            posted = {"feedback": given[n]} if n < len(given) else {}
            mark = Mark(
                ended=0.0, day="d", digest=f"{user}{n}", asked={"verifier": value}, posted=posted
            )
            ledger.admit(f"{user}/{n}", user, mark)
            ledger.learn(f"{user}/{n}", user, mark)
    return ledger


def test_users_who_vote_against_the_verifier_are_outliers_from_the_fifth_vote_on():
    honest = {f"u{n}": [1.0, 0.0] * 5 for n in range(4)}
    votes = {f"u{n}": [1.0, 0.0] for n in range(4)}
    for n, found in ((4, []), (5, ["bad"])):
        ledger = population(
            {**honest, "bad": [1.0, 0.0] * 5}, {**votes, "bad": ([0.0, 1.0] * 5)[:n]}
        )
        assert list(ledger.contrary()) == found
    assert population({"bad": [1.0] * 9}, {"bad": [0.0] * 9}).contrary() == {}  # nobody to compare


def test_a_judge_that_all_users_disagree_with_makes_no_outliers():
    outcomes = {f"u{n}": [1.0, 0.0] * 4 for n in range(6)}
    votes = {f"u{n}": [0.0, 1.0, 0.0, 0.0, 1.0, 1.0, 0.0, 1.0] for n in range(6)}
    assert population(outcomes, votes).contrary() == {}


@pytest.mark.parametrize("seed", range(5))
def test_honest_users_with_harder_questions_are_seldom_outliers(seed):
    """The chance of a good answer differs from user to user, by 0.1."""
    draw = random.Random(seed)
    chances = {f"u{n}": min(max(draw.gauss(0.6, 0.1), 0.0), 1.0) for n in range(40)}
    outcomes = {
        user: [float(draw.random() < chance) for _ in range(10)] for user, chance in chances.items()
    }
    ledger = population({**outcomes, "bad": [0.0] * 30}, {})
    found = ledger.unlike()
    assert "bad" in found
    assert len(found) <= 2
    assert ledger.few("d") == 5
    beyond = [n for n in range(30) if ledger.is_beyond(f"bad/{n}", "bad", "d")]
    assert beyond == [*range(5, 30)]


def test_nobody_is_an_outlier_among_few_users_or_sessions():
    few = {f"u{n}": [1.0] * 9 for n in range(4)}
    assert population({**few, "bad": [0.0] * 9}, {}).unlike() == {}
    many = {f"u{n}": [1.0] * 9 for n in range(9)}
    assert population({**many, "bad": [0.0] * 4}, {}).unlike() == {}
    assert list(population({**many, "bad": [0.0] * 5}, {}).unlike()) == ["bad"]
