"""crew: eight guards, each before two doors; what one finds tells the next which word it needs.

The guards take turns, and each says one of four words at each of its doors. A guard sees which door
it stands at and the colour behind the door that the guard before it opened last; the right word
depends on both. The outcome is the share of all doors that were opened. `own` is a reward of each
role: the share of its own doors, which is what the outcome would lose without this guard (a
difference reward, computed by the verifier without a replay). It leaves out that the next guard
would see another colour, which costs it nothing on average.
"""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

from tools import WORDS, Message, Tool, say

from agentrl import Reward, Scope, Trace

GUARDS = [f"guard{n}" for n in range(1, 9)]
COLOURS = ["red", "blue"]
DOORS = 2
_rng = random.Random("crew")
PLACES = [f"{guard}{colour}{n}" for guard in GUARDS for colour in COLOURS for n in range(DOORS)]
RIGHT = {place: _rng.choice(WORDS) for place in PLACES}
OTHER = {place: _rng.choice([word for word in WORDS if word != RIGHT[place]]) for place in PLACES}
BEHIND = {(guard, n): _rng.choice(COLOURS) for guard in GUARDS for n in range(DOORS)}


async def agent(task: dict[str, Any]) -> dict[str, int]:
    """How many doors each guard opened."""
    opened = dict.fromkeys(GUARDS, 0)
    found = dict.fromkeys(GUARDS, task["colour"])
    for door in range(DOORS):
        for guard, before in zip(GUARDS, GUARDS[-1:] + GUARDS[:-1], strict=True):
            place = f"{guard}{found[before]}{door}"
            if await say(place, guard) == RIGHT[place]:
                opened[guard] += 1
                found[guard] = BEHIND[guard, door]
    return opened


def verify(result: dict[str, int]) -> float:
    return sum(result.values()) / (DOORS * len(GUARDS))


def own(result: dict[str, int], trace: Trace) -> list[Reward]:
    roles = {call.role for call in trace.transitions}
    return [
        Reward(name="own", value=result[role] / DOORS, scope=Scope.ROLE, target=role)
        for role in GUARDS
        if role in roles
    ]


def best(messages: list[Message], tools: list[Tool]) -> tuple[str, str]:
    return "", RIGHT[messages[-1]["content"]]


def habit(messages: list[Message], tools: list[Tool]) -> tuple[str, str]:
    """The right word or one that is right elsewhere, with equal probability."""
    return "", random.choice([RIGHT, OTHER])[messages[-1]["content"]]


RANDOM = 1 / len(WORDS)


def tasks(times: int) -> list[dict[str, Any]]:
    return [
        {"id": f"{colour}/{n}", "input": {"colour": colour}}
        for n in range(times)
        for colour in COLOURS
    ]


crew, crew_heldout = tasks(1), tasks(16)


def build_crew(folder: Path, seed: int) -> None:
    from policies import build

    build(agent, habit, crew, 0.8, folder, seed)
