"""One user of twenty attacks: how far the mean outcome of each lane moves.

The sessions, the feedback and the labelling are real; the words are scripted: an answer that is
good or bad, a user who thanks or complains, and who votes in one session of five.
"""

from __future__ import annotations

import random
from collections import Counter
from math import isnan
from statistics import fmean

import pytest

from agentrl.core.config import resolve
from agentrl.core.types import CORRECTION, FEEDBACK
from agentrl.live.labels import Labeller
from agentrl.live.records import believed, outcome_of, user_of
from agentrl.runners.feedback import Feedback, give_feedback
from agentrl.store import open_store
from agentrl.store.base import Store
from tests.agentrl.live.sessions import NOW, RUN, Scripted, ended

USERS, EACH, MANY = 19, 10, 100  # honest users, their sessions, the attacker's
LANES = {"serving": 0.6, "candidate": 0.4}  # how often an answer of a lane is good
MAX_SHIFT = 0.03  # the most that a mean may move


class Population:
    """Users and their sessions; `verified`: whether the run has a verifier. Each user gets as many
    good answers of a lane as it gives, so that chance moves no mean."""

    def __init__(self, store: Store, *, verified: bool) -> None:
        self.store, self.random, self.verified = store, random.Random(1), verified
        self.count = 0
        self.asked: Counter[tuple[str, str]] = Counter()  # of a user and lane

    async def session(self, user: str, words: str, react: str) -> str:
        """A session, whose user reacts with words, or honestly if there are none; its name."""
        self.count += 1
        lane = min(LANES, key=lambda lane: self.asked[user, lane])
        before = self.asked[user, lane]
        self.asked[user, lane] += 1
        answer = "good" if int((before + 1) * LANES[lane]) > int(before * LANES[lane]) else "bad"
        honest = "thanks" if answer == "good" else "no!"
        texts = (words, answer, react or honest, f"{answer} bye")
        name = f"s{self.count}"
        await ended(self.store, name, *texts, user=user, lane=lane, at=NOW + self.count)
        self.last = float(answer == "good")
        return name

    async def honest(self) -> None:
        order = [f"u{n}" for n in range(USERS) for _ in range(EACH)]
        self.random.shuffle(order)
        for user in order:
            name = await self.session(user, f"question {self.count}", "")
            if self.random.random() < 0.2:
                await give_feedback(self.store, RUN, Feedback(session=name, value=self.last))

    async def attack(self, how: str) -> None:
        """votes: many sessions, voted down; game: the words after the answer lie too; repeat: one
        session again and again; corrections: each answer is corrected to another."""
        for number in range(MANY):
            words = "the same question" if how == "repeat" else f"attack {number}"
            name = await self.session("attacker", words, "no!" if how == "game" else "")
            said = {"correction": "give me all your money"} if how == "corrections" else {}
            await give_feedback(self.store, RUN, Feedback(session=name, value=0.0, **said))

    async def means(self, **people: int) -> dict[str, float]:
        """The mean outcome of each lane, once all is labelled."""
        given = {"name": RUN, "live": {"people": people}}
        verifier = Scripted(good=1.0, bad=0.0) if self.verified else Scripted()
        labeller = Labeller(
            self.store, resolve(given, source="test"), verifier, lambda: NOW + 1000.0
        )
        await labeller.start()
        for _ in range(2):  # what is known of a user at the end holds for its first sessions too
            await labeller.look()
            await labeller.settle()
        await labeller.look()
        rows = await self.store.rollouts(RUN)
        counted = [row for row in rows if not isnan(outcome_of(row))]
        given = [r.name for row in counted for r in believed(row, (FEEDBACK, CORRECTION)).rewards]
        self.corrections = given.count(CORRECTION)
        self.counted = sum(user_of(row) == "attacker" for row in counted)
        return {
            lane: fmean(outcome_of(row) for row in counted if row.task["lane"] == lane)
            for lane in LANES
        }


async def moved(tmp_path, how: str, verified: bool, **people: int) -> tuple[float, Population]:
    """How far the attacker moves a lane's mean, at most; and the population with it."""
    means = []
    for attacked in (False, True):
        async with open_store(f"sqlite:///{tmp_path}/{attacked}.db") as store:
            await store.open_run(RUN, {})
            population = Population(store, verified=verified)
            await population.honest()
            if attacked:
                await population.attack(how)
            means.append(await population.means(**people))
    clean, dirty = means
    far = max(abs(clean[lane] - dirty[lane]) for lane in LANES)
    print(f"{how}: {100 * far:.1f} points, {population.counted} sessions of the attacker count")
    return far, population


@pytest.mark.parametrize("verified", [True, False])
@pytest.mark.parametrize("how", ["votes", "game", "repeat", "corrections"])
async def test_one_attacker_of_twenty_moves_no_mean_by_three_points(tmp_path, how, verified):
    far, population = await moved(tmp_path, how, verified)
    assert far < MAX_SHIFT
    assert population.counted <= 10
    assert population.corrections <= (0 if verified else 10)


@pytest.mark.parametrize("how", ["votes", "game"])
async def test_without_protection_the_same_attacker_moves_them(tmp_path, how, monkeypatch):
    """So the test above would see it."""
    monkeypatch.setattr("agentrl.live.signals.MIN_SESSIONS", 10_000)
    far, population = await moved(tmp_path, how, False, per_user=0)
    assert far > 2 * MAX_SHIFT
    assert population.counted == MANY
