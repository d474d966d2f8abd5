"""files: a document in a tree of folders; wrong folders are dead ends that can be left again."""

from __future__ import annotations

import os
import random
from pathlib import Path
from typing import Any

from tools import Message, Tool, choose, tool

FOLDERS = ["old", "new", "big"]
DISKS = ["red", "blue"]
DEPTH, CALLS = (int(x) for x in os.environ.get("PARTS", "6,20").split(","))
SHARE = float(os.environ.get("SHARE", ".2"))
OPEN = tool("open", "folder", [*FOLDERS, "up"], "in")
_dice = random.Random("files")
RIGHT = {f"{disk}{depth}": _dice.choice(FOLDERS) for disk in DISKS for depth in range(DEPTH)}


HABIT = {(p, r): _dice.choice([w for w in FOLDERS if w != r]) for p, r in RIGHT.items()}


async def agent(task: dict[str, Any]) -> int:
    depth, wrong = 0, ""
    for _ in range(CALLS):
        place = f"{task['disk']}{depth}"
        messages: list[Message] = [{"role": "system", "content": "files"}]
        messages.append({"role": "user", "content": f"in {place}{wrong}"})
        _, to = await choose(messages, OPEN)
        if wrong:
            wrong = "" if to == "up" else wrong
        elif to == "up":
            depth = max(0, depth - 1)
        elif to == RIGHT[place]:
            depth += 1
        elif to:
            wrong = f"-{to}"
        if depth == DEPTH:
            break
    return depth


def verify(result: int) -> float:
    return result / DEPTH


def habit(messages: list[Message], tools: list[Tool]) -> tuple[str, str]:
    name, right = best(messages, tools)
    return name, HABIT.get((messages[-1]["content"].split()[1], right), right)


def best(messages: list[Message], tools: list[Tool]) -> tuple[str, str]:
    place = messages[-1]["content"].split()[1]
    return "open", "up" if "-" in place else RIGHT[place]


def tasks(times: int) -> list[dict[str, Any]]:
    return [{"id": f"{b}/{n}", "input": {"disk": b}} for n in range(times) for b in DISKS]


train, heldout = tasks(1), tasks(16)


def build1(folder: Path, seed: int) -> None:
    from policies import build

    build(agent, habit, train, SHARE, folder, seed)
