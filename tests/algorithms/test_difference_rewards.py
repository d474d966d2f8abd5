"""What a replay without a role comes to is a fair thing to compare the role with: over everything
that can be said, the difference has the policy gradient of the outcome, exactly."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

import pytest

from agentrl.algorithms.team_rewards import difference
from agentrl.core.types import Branch, Transition
from agentrl.runners.apis.base import CHAT
from agentrl.runners.gateway.features import Recording, recorded_calls
from agentrl.runners.gateway.request import ModelRequest
from tests import factories

ROLES = ("planner", "critic", "solver")
Ask = Callable[[str, str], bool]


def team(ask: Ask) -> float:
    """Later questions depend on earlier answers, one is asked twice, and one depends on nothing."""
    plan = ask("planner", "task")
    if not ask("critic", f"is {plan} right?"):
        plan = ask("planner", f"not {plan}")
    done = ask("solver", f"do {plan}") + 2 * ask("solver", "do the rest")
    again = ask("critic", "is True right?")
    return 0.3 * plan + done * again - 0.7 * plan * again + 0.1 * done**2


@dataclass
class Dice:
    """Follows one path of all that can happen: the tosses that are `given`, then heads."""

    given: tuple[bool, ...]
    tossed: list[bool] = field(default_factory=list)
    probability: float = 1.0

    def toss(self, p: float) -> bool:
        at = len(self.tossed)
        head = self.given[at] if at < len(self.given) else True
        self.tossed.append(head)
        self.probability *= p if head else 1 - p
        return head


def paths() -> Iterator[Dice]:
    """Every path once; the caller follows each to its end."""
    todo: list[tuple[bool, ...]] = [()]
    while todo:
        given = todo.pop()
        dice = Dice(given)
        yield dice
        tossed = tuple(dice.tossed)
        todo += [(*tossed[:at], False) for at in range(len(given), len(tossed))]


class Play(NamedTuple):
    reward: float
    record: list[Transition]
    score: dict[str, float]  # of each role: the sum of d log-prob / d its parameter


def sure(role: str, question: str) -> float:
    """The probability of yes, by a parameter of the role and by the question."""
    return 1 / (1 + math.exp(-0.4 * ROLES.index(role) - (sum(question.encode()) % 7) / 5 + 0.6))


def played(dice: Dice, recording: Recording) -> Play:
    """The team, answered from a record as far as that goes, and by a stand-in for its roles."""
    score, record = dict.fromkeys(ROLES, 0.0), []

    def ask(role: str, question: str) -> bool:
        messages = [{"role": "user", "content": question}]
        call = ModelRequest(CHAT, {}, None, len(record), "m", False, False, False, messages, [])
        rows = recording.take(call, role)
        if rows:
            said = (rows[0].answer or {})["content"]
        elif role in recording.without:
            said = dice.toss(0.25)
        else:
            p = sure(role, question)
            said = dice.toss(p)
            score[role] += said - p
        record.append(
            factories.call(
                str(len(record)),
                (),
                (),
                index=len(record),
                role=role,
                messages=messages,
                answer={"content": said},
            )
        )
        return bool(said)

    return Play(team(ask), record, score)


def test_the_difference_has_the_gradient_of_the_outcome() -> None:
    """Of every way the team can play and, for each, every way it can go without a role."""
    exact, credited = dict.fromkeys(ROLES, 0.0), dict.fromkeys(ROLES, 0.0)
    total = 0.0
    for dice in paths():
        source = played(dice, Recording([], []))
        total += dice.probability

        def value(coalition: frozenset[str], source: Play = source) -> float:
            without = set(ROLES) - coalition
            if not without:
                return source.reward
            branch = Branch(rollout="r", calls=len(source.record), without=sorted(without))
            mean = 0.0
            for other in paths():
                reward = played(other, recorded_calls(source.record, branch)).reward
                mean += other.probability * reward
            return mean

        gained = difference(value, ROLES)
        for role in ROLES:
            exact[role] += dice.probability * source.score[role] * source.reward
            credited[role] += dice.probability * source.score[role] * gained[role]
    assert total == pytest.approx(1)
    assert credited == pytest.approx(exact, abs=1e-12)
    assert min(map(abs, exact.values())) > 0.01
