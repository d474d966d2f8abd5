"""needle: one decisive call among many idle ones.

The agent walks through the rooms of a house and calls a tool in each. In one room there is a safe,
and the number that is tried there, of four, decides; the right one depends on the safe's colour.
What is done in the other rooms changes nothing. Each call is a conversation of its own, which is
told the room and what is in the bag. Only the outcome is rewarded: whether the jewel is in it in
the end. Held-out houses have other rooms before and after the safe.
"""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

from tools import Message, Tool, choose, tool

NUMBERS = ["one", "two", "three", "four"]
ROOMS = [
    "attic", "bath", "cellar", "den", "garage", "hall",
    "kitchen", "library", "office", "pantry", "porch", "study",
]  # fmt: skip
COLOURS = ["red", "blue", "green", "white"]
LENGTH = 12  # rooms of a house
HOUSES = 48
TURN = tool("turn", "number", NUMBERS)
BEST, RANDOM = 1.0, 1 / 4
_dice = random.Random("needle")
RIGHT = {colour: _dice.choice(NUMBERS) for colour in COLOURS}


async def agent(task: dict[str, Any]) -> str:
    """What is in the bag in the end."""
    bag = "nothing"
    for place in task["rooms"]:
        messages: list[Message] = [{"role": "system", "content": "house"}]
        messages.append({"role": "user", "content": f"{place} bag {bag}"})
        _, number = await choose(messages, TURN)
        if place.startswith("safe") and number == RIGHT[place.split()[1]]:
            bag = "jewel"
    return bag


def verify(result: str) -> float:
    return float(result == "jewel")


def best(messages: list[Message], tools: list[Tool]) -> tuple[str, str]:
    place, colour, *_ = messages[-1]["content"].split()
    return "turn", RIGHT[colour] if place == "safe" else random.choice(NUMBERS)


def habit(messages: list[Message], tools: list[Tool]) -> tuple[str, str]:
    """The right number or the one after it, with equal chances."""
    name, number = best(messages, tools)
    return name, random.choice([number, NUMBERS[(NUMBERS.index(number) + 1) % len(NUMBERS)]])


def house(number: int) -> dict[str, Any]:
    """Every colour is as frequent, and so is every place of the safe."""
    dice = random.Random(number)
    rooms = dice.sample(ROOMS, LENGTH - 1)
    place, colour = number // len(COLOURS) % LENGTH, number % len(COLOURS)
    rooms.insert(place, f"safe {COLOURS[colour]}")
    return {"id": str(number), "input": {"rooms": rooms}}


train = [house(number) for number in range(HOUSES)]
heldout = [house(number) for number in range(1000, 1064)]


def build1(folder: Path, seed: int) -> None:
    from policies import build

    build(agent, habit, train + heldout, 0.8, folder, seed)
