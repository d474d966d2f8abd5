"""FrozenLake in text, slippery: from the start to the goal of a frozen lake, around its holes.

Each step is told the lake's name and the place, so states recur within and across rollouts. Of ten
steps two go to the side. The outcome is 1 at the goal, 0 in a hole or after `STEPS` steps. The game
is that of Gymnasium's FrozenLake-v1, as RAGEN (arXiv 2504.20073) gives it to language models.
"""

from __future__ import annotations

import random
from functools import lru_cache
from pathlib import Path
from typing import Any

from tools import Message, Tool, choose, tool

MOVES = {"left": (0, -1), "down": (1, 0), "right": (0, 1), "up": (-1, 0)}
SIDES = {"left": "up down", "right": "up down", "up": "left right", "down": "left right"}
SLIP = 0.2  # chance of a step to the side
STEPS = 10
LAKES = {
    "red": "SFFF FHFH FFFH HFFG",
    "blue": "SFFF HFHF FFFF HFHG",
    "green": "SFHF FFFF HFHF FFFG",
    "white": "SHFF FFFH FHFF FFFG",
}
GO = tool("go", "to", list(MOVES))
State = tuple[int, int]
GOAL = (3, 3)


def lake(name: str) -> list[str]:
    return LAKES[name].split()


def moved(state: State, way: str) -> State:
    row, column = state[0] + MOVES[way][0], state[1] + MOVES[way][1]
    return min(max(row, 0), 3), min(max(column, 0), 3)


def outcomes(state: State, way: str) -> list[tuple[float, State]]:
    """Where a step leads, with chances. A call that names no way goes nowhere."""
    if way not in MOVES:
        return [(1.0, state)]
    sides = [(SLIP / 2, moved(state, side)) for side in SIDES[way].split()]
    return [(1 - SLIP, moved(state, way)), *sides]


def shown(name: str, state: State) -> str:
    return f"lake {name} row {state[0]} column {state[1]}"


async def agent(task: dict[str, Any]) -> float:
    """1 if the goal was reached. Every step is a conversation of its own: its place says all."""
    state, dice = (0, 0), random.Random()
    for _ in range(STEPS):
        messages: list[Message] = [{"role": "system", "content": "lake"}]
        messages.append({"role": "user", "content": shown(task["lake"], state)})
        _, way = await choose(messages, GO)
        chances, places = zip(*outcomes(state, way), strict=True)
        (state,) = dice.choices(places, chances)
        if lake(task["lake"])[state[0]][state[1]] in "HG":
            break
    return float(state == GOAL)


def verify(result: float) -> float:
    return result


@lru_cache(None)
def value(name: str, state: State, left: int, uniform: bool = False, fade: float = 1.0) -> float:
    """Chance of the goal within so many steps, by the best steps or by any. fade: what a step later
    is worth."""
    cell = lake(name)[state[0]][state[1]]
    if cell in "HG" or not left:
        return float(cell == "G")
    values = [
        fade * sum(p * value(name, to, left - 1, uniform, fade) for p, to in outcomes(state, way))
        for way in MOVES
    ]
    return sum(values) / len(values) if uniform else max(values)


def best(messages: list[Message], tools: list[Tool]) -> tuple[str, str]:
    """The best step of a player who is in a hurry, as the grid does not tell how many are left."""
    _, name, _, row, _, column = messages[-1]["content"].split()
    state = int(row), int(column)

    def worth(way: str) -> float:
        return sum(p * value(name, to, 50, fade=0.9) for p, to in outcomes(state, way))

    return "go", max(MOVES, key=worth)


def habit(messages: list[Message], tools: list[Tool]) -> tuple[str, str]:
    """The best step or one other, with equal chances."""
    name, way = best(messages, tools)
    ways = list(MOVES)
    return name, random.choice([way, ways[(ways.index(way) + 1) % len(ways)]])


def mean_value(uniform: bool) -> float:
    return sum(value(name, (0, 0), STEPS, uniform) for name in LAKES) / len(LAKES)


BEST, RANDOM = mean_value(False), mean_value(True)  # of who knows how many steps are left
train = [{"id": name, "input": {"lake": name}} for name in LAKES]
heldout = [{"id": f"{name}/{n}", "input": {"lake": name}} for n in range(16) for name in LAKES]


def build1(folder: Path, seed: int) -> None:
    from policies import build

    build(agent, habit, train, 0.8, folder, seed)
