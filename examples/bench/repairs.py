"""repairs: parts of a machine are mended in turn, and a test says how many work so far.

A machine has 24 broken parts. The agent calls a tool once for each, with one of four ways to mend
it; the right one depends on the part. Each call is a conversation of its own, which is told how
many parts work by now, as a coding agent sees how many tests pass. Held-out machines belong to
people whom no training task names.

Only the outcome is rewarded: the share of parts that work in the end. It is the sum of 24 choices
that do not depend on each other, so nearly all of its variance is noise to each of them.
"""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

from tools import Message, Tool, choose, tool

WAYS = ["glue", "weld", "oil", "replace"]
PEOPLE = ["Ada", "Ben", "Cleo", "Dan", "Eva", "Finn", "Gail", "Hugo"]
PARTS = 24
MEND = tool("mend", "way", WAYS)
BEST, RANDOM = 1.0, 1 / 4
_dice = random.Random("repairs")
RIGHT = [_dice.choice(WAYS) for _ in range(PARTS)]
OTHER = [_dice.choice([way for way in WAYS if way != right]) for right in RIGHT]


async def agent(task: str) -> float:
    """The share of parts that work."""
    working = 0
    for part in range(PARTS):
        messages: list[Message] = [{"role": "system", "content": "repairs"}]
        messages.append({"role": "user", "content": f"part {part} {task} works {working}"})
        _, way = await choose(messages, MEND)
        working += way == RIGHT[part]
    return working / PARTS


def verify(result: float) -> float:
    return result


def best(messages: list[Message], tools: list[Tool]) -> tuple[str, str]:
    _, part, *_ = messages[-1]["content"].split()
    return "mend", RIGHT[int(part)]


def habit(messages: list[Message], tools: list[Tool]) -> tuple[str, str]:
    """The right way or one that is right elsewhere, with equal chances."""
    _, part, *_ = messages[-1]["content"].split()
    return "mend", random.choice([RIGHT, OTHER])[int(part)]


def tasks(people: list[str], times: int) -> list[dict[str, Any]]:
    return [{"id": f"{person}/{n}", "input": person} for n in range(times) for person in people]


train, heldout = tasks(PEOPLE[:6], 1), tasks(PEOPLE[6:], 32)


def build1(folder: Path, seed: int) -> None:
    from policies import build

    build(agent, habit, train + heldout[:2], 0.8, folder, seed)
