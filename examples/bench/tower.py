"""tower: blocks are put on each other, and a wrong one takes the topmost down.

Which of four blocks holds depends on the tower and the level. So the agent stands before a level
again and again, with right and wrong blocks in one rollout. Each block is a conversation of its
own, which is told the level. Only the outcome is rewarded: the share of the levels that stand when
all do, or after `BLOCKS` blocks.
"""

from __future__ import annotations

import random
from functools import lru_cache
from pathlib import Path
from typing import Any

from tools import Message, Tool, choose, tool

SHAPES = ["wide", "long", "flat", "round"]
TOWERS = ["red", "blue"]
LEVELS, BLOCKS = 4, 20
PUT = tool("put", "block", SHAPES, "level")
_dice = random.Random("tower")
RIGHT = {f"{tower}{level}": _dice.choice(SHAPES) for tower in TOWERS for level in range(LEVELS)}
HABIT = {at: _dice.choice([one for one in SHAPES if one != right]) for at, right in RIGHT.items()}


async def agent(task: dict[str, Any]) -> int:
    """How many levels stand."""
    level = 0
    for _ in range(BLOCKS):
        at = f"{task['tower']}{level}"
        messages: list[Message] = [{"role": "system", "content": "tower"}]
        messages.append({"role": "user", "content": f"level {at}"})
        _, block = await choose(messages, PUT)
        level = level + 1 if block == RIGHT[at] else max(0, level - 1)
        if level == LEVELS:
            break
    return level


def verify(result: int) -> float:
    return result / LEVELS


def best(messages: list[Message], tools: list[Tool]) -> tuple[str, str]:
    return "put", RIGHT[messages[-1]["content"].split()[1]]


def habit(messages: list[Message], tools: list[Tool]) -> tuple[str, str]:
    """What holds in another tower."""
    return "put", HABIT[messages[-1]["content"].split()[1]]


@lru_cache(None)
def random_score(level: int = 0, left: int = BLOCKS) -> float:
    """The mean outcome from here of blocks that are chosen with equal chances."""
    if level == LEVELS or not left:
        return level / LEVELS
    right, wrong = (random_score(at, left - 1) for at in (level + 1, max(0, level - 1)))
    return right / len(SHAPES) + wrong * (1 - 1 / len(SHAPES))


def tasks(times: int) -> list[dict[str, Any]]:
    return [
        {"id": f"{tower}/{n}", "input": {"tower": tower}} for n in range(times) for tower in TOWERS
    ]


train, heldout = tasks(1), tasks(16)


def build1(folder: Path, seed: int) -> None:
    from policies import build

    build(agent, habit, train, 0.1, folder, seed)
