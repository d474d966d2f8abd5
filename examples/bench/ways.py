"""Ways of several places, each of which wants one word of four: doors, bank and tower.

doors: a wrong word opens no door; the agent stands before it again.
bank: bookings of transactions of two; a wrong one takes its transaction back.
tower: blocks on each other; a wrong one takes the topmost down.

Which word is right depends on the place. Each word is a conversation of its own, which is told the
place, and a rollout ends at the last place or after a number of words. Only the outcome is
rewarded: the share of the way that was gone. The agent comes to the same place again, with right
words and wrong ones in one rollout, and an outcome for all of it tells neither apart.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from tools import WORDS, Message, Tool, say

TOWNS = ["red", "blue"]


@dataclass(frozen=True, slots=True)
class Way:
    places: int
    words: int  # that may be said
    back: Callable[[int], int]  # where a wrong word leads, from each place
    step: int = 1  # places that count as one part of the outcome

    def score(self, place: int) -> float:
        return place // self.step * self.step / self.places


WAYS = {
    "doors": Way(places=8, words=20, back=lambda place: place),
    "bank": Way(places=8, words=24, back=lambda place: place - place % 2, step=2),
    "tower": Way(places=4, words=20, back=lambda place: max(0, place - 1)),
}
_dice = random.Random("ways")
PLACES = [
    f"{name} {town}{n}" for name, way in WAYS.items() for town in TOWNS for n in range(way.places)
]
RIGHT = {place: _dice.choice(WORDS) for place in PLACES}
HABIT = {place: _dice.choice([word for word in WORDS if word != RIGHT[place]]) for place in PLACES}


async def agent(task: dict[str, Any]) -> float:
    """How much of the way was gone."""
    way, place = WAYS[task["way"]], 0
    for _ in range(way.words):
        at = f"{task['way']} {task['town']}{place}"
        place = place + 1 if await say(at, "policy") == RIGHT[at] else way.back(place)
        if place == way.places:
            break
    return way.score(place)


def verify(result: float) -> float:
    return result


def best(messages: list[Message], tools: list[Tool]) -> tuple[str, str]:
    return "", RIGHT[messages[-1]["content"]]


def habit(messages: list[Message], tools: list[Tool]) -> tuple[str, str]:
    """What is right elsewhere."""
    return "", HABIT[messages[-1]["content"]]


def random_score(name: str) -> float:
    """The mean outcome of words that are chosen with equal chances."""
    way = WAYS[name]

    @lru_cache(None)
    def score(place: int, left: int) -> float:
        if place == way.places or not left:
            return way.score(place)
        right, wrong = (score(to, left - 1) for to in (place + 1, way.back(place)))
        return right / len(WORDS) + wrong * (1 - 1 / len(WORDS))

    return score(0, way.words)


def tasks(name: str, times: int) -> list[dict[str, Any]]:
    return [
        {"id": f"{town}/{n}", "input": {"way": name, "town": town}}
        for n in range(times)
        for town in TOWNS
    ]


doors, bank, tower = (tasks(name, 1) for name in WAYS)
doors_heldout, bank_heldout, tower_heldout = (tasks(name, 16) for name in WAYS)


def build_doors(folder: Path, seed: int) -> None:
    from policies import build

    build(agent, habit, doors, 0.2, folder, seed)


def build_bank(folder: Path, seed: int) -> None:
    from policies import build

    build(agent, habit, bank, 0.1, folder, seed)


def build_tower(folder: Path, seed: int) -> None:
    from policies import build

    build(agent, habit, tower, 0.1, folder, seed)
