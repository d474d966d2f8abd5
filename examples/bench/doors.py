"""doors: a way through a house of locked doors, each of which one key of four opens.

Which key opens a door depends on the door. A wrong key costs a try, and the agent stands before the
same door again, as when a tool was called with wrong arguments. Each try is a conversation of its
own, which is told the door. Only the outcome is rewarded: the share of the doors that were opened
within `TRIES`. A rollout tries right and wrong keys at the same door, and an outcome for all of it
tells neither apart.
"""

from __future__ import annotations

import random
from math import comb
from pathlib import Path
from typing import Any

from tools import Message, Tool, choose, tool

KEYS = ["brass", "iron", "silver", "gold"]
HOUSES = ["red", "blue"]
DOORS, TRIES = 8, 20
USE = tool("use", "key", KEYS, "door")
_dice = random.Random("doors")
RIGHT = {f"{house}{door}": _dice.choice(KEYS) for house in HOUSES for door in range(DOORS)}
HABIT = {door: _dice.choice([key for key in KEYS if key != right]) for door, right in RIGHT.items()}


async def agent(task: dict[str, Any]) -> int:
    """How many doors were opened."""
    opened = 0
    for _ in range(TRIES):
        messages: list[Message] = [{"role": "system", "content": "house"}]
        messages.append({"role": "user", "content": f"door {task['house']}{opened}"})
        _, key = await choose(messages, USE)
        opened += key == RIGHT[f"{task['house']}{opened}"]
        if opened == DOORS:
            break
    return opened


def verify(result: int) -> float:
    return result / DOORS


def best(messages: list[Message], tools: list[Tool]) -> tuple[str, str]:
    return "use", RIGHT[messages[-1]["content"].split()[1]]


def habit(messages: list[Message], tools: list[Tool]) -> tuple[str, str]:
    """What opens the door of the same name in another town."""
    return "use", HABIT[messages[-1]["content"].split()[1]]


def random_score() -> float:
    """The mean of min(DOORS, successes) of TRIES tries that succeed once in four."""
    chances = [comb(TRIES, n) * 0.25**n * 0.75 ** (TRIES - n) for n in range(TRIES + 1)]
    return sum(min(n, DOORS) * chance for n, chance in enumerate(chances)) / DOORS


def tasks(times: int) -> list[dict[str, Any]]:
    return [
        {"id": f"{house}/{n}", "input": {"house": house}} for n in range(times) for house in HOUSES
    ]


train, heldout = tasks(1), tasks(16)


def build1(folder: Path, seed: int) -> None:
    from policies import build

    build(agent, habit, train, 0.2, folder, seed)
