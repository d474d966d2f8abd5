"""retry: a service is set up by calls in turn, and each that fails costs 1.

At each step one word of four is right, which depends on the service. A wrong one fails, and the
agent tries the step again, until the last one is done or it has made all its calls. The outcome is
minus the number of calls that failed: no rollout has a positive one, and better ones are shorter.
"""

from __future__ import annotations

import random
from functools import lru_cache
from pathlib import Path
from typing import Any

from tools import WORDS, Message, Tool, reply

STEPS, CALLS = 4, 8
SERVICES = ["red", "blue"]
_dice = random.Random("retry")
PLACES = [f"{service}{n}" for service in SERVICES for n in range(STEPS)]
RIGHT = {place: _dice.choice(WORDS) for place in PLACES}
OTHER = {place: _dice.choice([word for word in WORDS if word != RIGHT[place]]) for place in PLACES}


async def agent(task: str) -> float:
    """Minus the number of calls that failed."""
    messages: list[Message] = []
    step, failed, before = 0, 0, "begin"
    while step < STEPS and step + failed < CALLS:
        messages.append({"role": "user", "content": f"{before} {task}{step}"})
        if await reply(messages) == RIGHT[f"{task}{step}"]:
            step, before = step + 1, "ok"
        else:
            failed, before = failed + 1, "error"
    return -float(failed)


def verify(result: float) -> float:
    return result


def best(messages: list[Message], tools: list[Tool]) -> tuple[str, str]:
    return "", RIGHT[messages[-1]["content"].split()[1]]


def habit(messages: list[Message], tools: list[Tool]) -> tuple[str, str]:
    """The right word or one that is right elsewhere, with equal chances."""
    return "", random.choice([RIGHT, OTHER])[messages[-1]["content"].split()[1]]


@lru_cache(None)
def random_score(step: int = 0, left: int = CALLS) -> float:
    """The mean outcome of words that are chosen with equal chances."""
    if step == STEPS or not left:
        return 0.0
    right, wrong = random_score(step + 1, left - 1), random_score(step, left - 1) - 1
    return right / len(WORDS) + wrong * (1 - 1 / len(WORDS))


def tasks(times: int) -> list[dict[str, Any]]:
    return [{"id": f"{s}/{n}", "input": s} for n in range(times) for s in SERVICES]


train, heldout = tasks(1), tasks(16)


def build1(folder: Path, seed: int) -> None:
    from policies import build

    build(agent, habit, train, 0.8, folder, seed)
