"""repairs: parts of a machine are mended in turn, and a test says how many work so far.

A machine has six broken parts. The agent calls a tool once for each, with one of four ways to mend
it; the right one depends on the part and the model of the machine. The tool's result is that of the
machine's test: how many parts work by now, as a coding agent sees how many tests pass. Held-out
machines belong to people whom no training task names.

Only the outcome is rewarded: the share of parts that work in the end. It is the sum of six choices
that do not depend on each other, so most of its variance is noise to each of them.
"""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

from tools import Message, Tool, answer_tool, choose, tool

WAYS = ["glue", "weld", "oil", "replace"]
MODELS = ["red", "blue", "green", "white"]
PEOPLE = ["Ada", "Ben", "Cleo", "Dan", "Eva", "Finn", "Gail", "Hugo"]
PARTS = 6
MEND = tool("mend", "way", WAYS)
BEST, RANDOM = 1.0, 1 / 4
_dice = random.Random("repairs")
RIGHT = {model: [_dice.choice(WAYS) for _ in range(PARTS)] for model in MODELS}


async def agent(task: str) -> float:
    """The share of parts that work."""
    messages: list[Message] = [{"role": "system", "content": "repairs"}]
    working = 0
    for part in range(PARTS):
        asked = f"part {part} {task} works {working}"
        if part:
            answer_tool(messages, asked)
        else:
            messages.append({"role": "user", "content": asked})
        _, way = await choose(messages, MEND)
        working += way == RIGHT[task.split()[0]][part]
    return working / PARTS


def verify(result: float) -> float:
    return result


def best(messages: list[Message], tools: list[Tool]) -> tuple[str, str]:
    _, part, model, *_ = messages[-1]["content"].split()
    return "mend", RIGHT[model][int(part)]


def tasks(people: list[str], times: int) -> list[dict[str, Any]]:
    return [
        {"id": f"{model}/{person}/{n}", "input": f"{model} {person}"}
        for n in range(times)
        for person in people
        for model in MODELS
    ]


train, heldout = tasks(PEOPLE[:6], 1), tasks(PEOPLE[6:], 8)


def build1(folder: Path, seed: int) -> None:
    from policies import build

    build(agent, best, train + heldout, 0.2, folder, seed, 250)
