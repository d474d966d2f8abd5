"""seek: a search whose results are mostly empty.

Three pages about a topic are to be found, one after the other, each by one word of four. Any other
word finds nothing, and "nothing" does not tell what was searched for or how many pages there are by
now: the conversation does. Only the outcome is rewarded: whether all pages were found in time.
"""

from __future__ import annotations

import random
from math import comb
from pathlib import Path
from typing import Any

from tools import WORDS, Message, Tool, reply

PAGES, CALLS = 3, 6
TOPICS = ["red", "blue", "green", "white"]
_dice = random.Random("seek")
RIGHT = {topic: [_dice.choice(WORDS) for _ in range(PAGES)] for topic in TOPICS}
OTHER = {
    topic: [_dice.choice([word for word in WORDS if word != right]) for right in way]
    for topic, way in RIGHT.items()
}
RANDOM = sum(comb(CALLS, n) * 3 ** (CALLS - n) for n in range(PAGES, CALLS + 1)) / 4**CALLS


async def agent(task: str) -> float:
    """Whether all pages were found."""
    messages: list[Message] = [{"role": "user", "content": task}]
    found = 0
    for _ in range(CALLS):
        right = await reply(messages) == RIGHT[task][found]
        found += right
        if found == PAGES:
            return 1.0
        messages.append({"role": "user", "content": f"page{found}" if right else "nothing"})
    return 0.0


def verify(result: float) -> float:
    return result


def place(messages: list[Message]) -> tuple[str, int]:
    """The topic and the number of pages that were found."""
    return messages[0]["content"], sum(m["content"].startswith("page") for m in messages)


def best(messages: list[Message], tools: list[Tool]) -> tuple[str, str]:
    topic, found = place(messages)
    return "", RIGHT[topic][found]


def habit(messages: list[Message], tools: list[Tool]) -> tuple[str, str]:
    """The right word or one that is right elsewhere, with equal chances."""
    topic, found = place(messages)
    return "", random.choice([RIGHT, OTHER])[topic][found]


def tasks(times: int) -> list[dict[str, Any]]:
    return [{"id": f"{topic}/{n}", "input": topic} for n in range(times) for topic in TOPICS]


train, heldout = tasks(1), tasks(8)


def build1(folder: Path, seed: int) -> None:
    from policies import build

    build(agent, habit, train, 0.8, folder, seed)
