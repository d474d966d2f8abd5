"""lengths: a long solution that is worth more than a short one.

The first word chooses how a project is done, two of the four each way. The long way has eight steps
and is worth the share of them that are right; the short one has a single step and is worth 0.8 if
it is right. So nine calls can have 1.0, two calls 0.8, and who discounts later rewards learns the
short way. Which word is right at a step depends on the project.
"""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

from tools import WORDS, Message, Tool, reply

STEPS = {"long": 8, "short": 1}
WORTH = {"long": 1.0, "short": 0.8}
PROJECTS = ["red", "blue"]
_dice = random.Random("lengths")
LONG = {project: _dice.sample(WORDS, 2) for project in PROJECTS}
PLACES = [f"{way} {p}{n}" for p in PROJECTS for way, steps in STEPS.items() for n in range(steps)]
RIGHT = {place: _dice.choice(WORDS) for place in PLACES}
OTHER = {place: _dice.choice([word for word in WORDS if word != RIGHT[place]]) for place in PLACES}
RANDOM = sum(WORTH.values()) / len(WORTH) / len(WORDS)


async def agent(task: str) -> float:
    """What the solution is worth."""
    messages: list[Message] = [{"role": "user", "content": task}]
    way = "long" if await reply(messages) in LONG[task] else "short"
    right = 0
    for n in range(STEPS[way]):
        messages.append({"role": "user", "content": f"{way} {task}{n}"})
        right += await reply(messages) == RIGHT[f"{way} {task}{n}"]
    return WORTH[way] * right / STEPS[way]


def verify(result: float) -> float:
    return result


def best(messages: list[Message], tools: list[Tool]) -> tuple[str, str]:
    now = messages[-1]["content"]
    return "", RIGHT.get(now) or random.choice(LONG[now])


def habit(messages: list[Message], tools: list[Tool]) -> tuple[str, str]:
    """Either way; the right word of a step or one that is right elsewhere, with equal chances."""
    return "", random.choice([RIGHT, OTHER]).get(messages[-1]["content"]) or random.choice(WORDS)


def tasks(times: int) -> list[dict[str, Any]]:
    return [{"id": f"{p}/{n}", "input": p} for n in range(times) for p in PROJECTS]


train, heldout = tasks(1), tasks(16)


def build1(folder: Path, seed: int) -> None:
    from policies import build

    build(agent, habit, train, 0.8, folder, seed)
