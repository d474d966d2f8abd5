"""edit-k: one call decides, and k tools say only that they were called.

A coding agent says how to mend a bug, with one word of four; which one is right depends on the bug.
Then k tools answer "saved", whatever it did, and the last call sees whether the tests passed. What
calls after the first say changes nothing. Only the outcome is rewarded: whether the tests passed.
"""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

from tools import WORDS, Message, Tool, reply

BUGS = [f"bug{n}" for n in range(4)]
_dice = random.Random("edit")
RIGHT = {bug: _dice.choice(WORDS) for bug in BUGS}
OTHER = {bug: _dice.choice([word for word in WORDS if word != RIGHT[bug]]) for bug in BUGS}


async def agent(task: dict[str, Any]) -> float:
    """Whether the tests passed."""
    messages: list[Message] = [{"role": "user", "content": task["bug"]}]
    passed = await reply(messages) == RIGHT[task["bug"]]
    for said in ["saved"] * task["k"] + [f"tests {'passed' if passed else 'failed'}"]:
        messages.append({"role": "user", "content": said})
        await reply(messages)
    return float(passed)


def verify(result: float) -> float:
    return result


def best(messages: list[Message], tools: list[Tool]) -> tuple[str, str]:
    return "", RIGHT.get(messages[-1]["content"]) or random.choice(WORDS)


def habit(messages: list[Message], tools: list[Tool]) -> tuple[str, str]:
    """The right word or one that is right elsewhere, with equal chances."""
    return "", random.choice([RIGHT, OTHER]).get(messages[-1]["content"]) or random.choice(WORDS)


def tasks(k: int, times: int) -> list[dict[str, Any]]:
    return [
        {"id": f"{bug}/{n}", "input": {"bug": bug, "k": k}} for n in range(times) for bug in BUGS
    ]


edit4, edit8 = tasks(4, 1), tasks(8, 1)
edit4_heldout, edit8_heldout = tasks(4, 8), tasks(8, 8)


def build4(folder: Path, seed: int) -> None:
    from policies import build

    build(agent, habit, edit4, 0.8, folder, seed)


def build8(folder: Path, seed: int) -> None:
    from policies import build

    build(agent, habit, edit8, 0.8, folder, seed)
