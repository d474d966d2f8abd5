"""needle: one decisive call among many idle ones.

The agent walks through the rooms of a house and calls a tool in each. In one room there is a safe,
and the number it is opened with, of four, decides; the right one depends on the safe's colour. What
is done in the other rooms changes nothing. Only the outcome is rewarded. Held-out houses have other
rooms before and after the safe.
"""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

from tools import Message, Tool, answer_tool, choose, tool

NUMBERS = ["one", "two", "three", "four"]
ROOMS = [
    "attic", "bath", "cellar", "den", "garage", "hall",
    "kitchen", "library", "office", "pantry", "porch", "study",
]  # fmt: skip
COLOURS = ["red", "blue", "green", "white"]
LENGTH = 8  # rooms of a house
HOUSES = 48
TURN = tool("turn", "number", NUMBERS)
BEST, RANDOM = 1.0, 1 / 4
_dice = random.Random("needle")
RIGHT = {colour: _dice.choice(NUMBERS) for colour in COLOURS}


async def agent(task: dict[str, Any]) -> str:
    """The number that the safe was opened with."""
    messages: list[Message] = [{"role": "system", "content": "house"}]
    tried = ""
    for place in task["rooms"]:
        if len(messages) > 1:
            answer_tool(messages, place)
        else:
            messages.append({"role": "user", "content": place})
        _, number = await choose(messages, TURN)
        if place.startswith("safe"):
            tried = number
    return tried


def verify(task: dict[str, Any], result: str) -> float:
    (safe,) = (place for place in task["input"]["rooms"] if place.startswith("safe"))
    return float(result == RIGHT[safe.split()[1]])


def best(messages: list[Message], tools: list[Tool]) -> tuple[str, str]:
    place, _, colour = messages[-1]["content"].partition(" ")
    return "turn", RIGHT[colour] if place == "safe" else random.choice(NUMBERS)


def house(number: int) -> dict[str, Any]:
    """Every colour is as frequent, and so is every place of the safe in the first houses."""
    dice = random.Random(number)
    rooms = dice.sample(ROOMS, LENGTH - 1)
    rooms.insert(number % LENGTH, f"safe {COLOURS[number // LENGTH % len(COLOURS)]}")
    return {"id": str(number), "input": {"rooms": rooms}}


train = [house(number) for number in range(HOUSES)]
heldout = [house(number) for number in range(1000, 1064)]


def build1(folder: Path, seed: int) -> None:
    from policies import build

    build(agent, best, train + heldout, 0.15, folder, seed)
