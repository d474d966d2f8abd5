"""Weights and outliers, against numbers worked out by hand."""

from __future__ import annotations

import math
import random

import pytest
from msgspec.structs import replace

from agentrl.live.records import Mark
from agentrl.live.signals import Ledger, weighted

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
            voted = votes.get(user, [])
            posted = {"feedback": voted[n]} if n < len(voted) else {}
            mark = Mark(
                ended=float(n),
                day="d",
                digest=f"{user}{n}",
                asked={"verifier": value},
                posted=posted,
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
    marks = [Mark(ended=float(n), day="d") for n in range(30)]
    beyond = [n for n, mark in enumerate(marks) if ledger.is_beyond(f"bad/{n}", "bad", mark)]
    assert beyond == [*range(5, 30)]


def test_nobody_is_an_outlier_among_few_users_or_sessions():
    few = {f"u{n}": [1.0] * 9 for n in range(4)}
    assert population({**few, "bad": [0.0] * 9}, {}).unlike() == {}
    many = {f"u{n}": [1.0] * 9 for n in range(9)}
    assert population({**many, "bad": [0.0] * 4}, {}).unlike() == {}
    assert list(population({**many, "bad": [0.0] * 5}, {}).unlike()) == ["bad"]


def day_of(ended: float) -> str:
    return f"{int(ended // 86_400):06d}"


def of_day(n: int, day: float, user: str = "u", **more: str) -> tuple[str, str, Mark]:
    ended = day * 86_400.0 + n
    return f"{user}/{day}/{n}", user, Mark(ended=ended, day=day_of(ended), digest=f"{n}", **more)


def test_what_counts_does_not_depend_on_the_order_in_which_marks_are_read():
    """A restart reads the store in the order of ids, not of time."""
    ledger, marks = Ledger(3, WEIGHTS), []
    for n in range(5):
        session, user, mark = of_day(n, 1)
        marks.append((session, user, replace(mark, held=ledger.admit(session, user, mark))))
    assert [bool(mark.held) for *_, mark in marks] == [False] * 3 + [True] * 2
    again = Ledger(3, WEIGHTS)
    for session, user, mark in reversed(marks):
        again.learn(session, user, mark)
    for one in (ledger, again):
        assert "3 others" in one.admit(*of_day(9, 1))
        assert one.admit(*of_day(0, 2)) == ""
        assert [one.is_beyond(*marks[n]) for n in range(3)] == [False, True, True]


def test_a_ledger_keeps_few_days_and_forgets_users_who_have_gone():
    ledger = Ledger(10, WEIGHTS)
    for day in range(1, 100):
        for n in range(5):
            session, user, mark = of_day(n, day, user=f"u{day}")
            assert ledger.admit(session, user, mark) == ""
            ledger.learn(session, user, replace(mark, asked={"verifier": 1.0}))
    assert len(ledger.days) == 3
    assert sum(len(found) for day in ledger.days.values() for found in day.counted.values()) == 15
    assert len(ledger.users) <= 34
    assert "long before" in ledger.admit(*of_day(7, 5))
    ledger.learn(*of_day(0, 9999))  # a clock that jumps takes nothing away from today
    assert "repeats" in ledger.admit("other", *of_day(1, 99, user="u99")[1:])
    assert len(ledger.users) <= 35


def test_a_user_is_known_by_its_last_sessions():
    ledger = Ledger(0, WEIGHTS)
    for n in reversed(range(1000)):
        session, user, mark = of_day(n, 1)
        ledger.learn(session, user, replace(mark, asked={"verifier": float(n >= 800)}))
    assert ledger.users["u"].mean("outcome") == (1.0, 200)


def test_outliers_are_not_looked_for_after_every_session(monkeypatch):
    looked = []
    monkeypatch.setattr("agentrl.live.signals.MANY", 100)
    monkeypatch.setattr(Ledger, "unlike", lambda self: looked.append(1) or {})
    ledger = Ledger(0, WEIGHTS)
    for n in range(5000):
        session, user, mark = of_day(n, 1, user=f"u{n % 50}")
        ledger.learn(session, user, replace(mark, asked={"verifier": 1.0}))
        ledger.outliers()
    assert 100 < len(looked) < 1000
    before = len(looked)
    ledger.outliers()  # nothing is new
    assert len(looked) == before
