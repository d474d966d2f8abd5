"""Sokoban in text: push every box onto a goal. A box in a corner stays there.

Each step is told the level and where the player and the boxes are; where walls and goals are the
agent learns by trying. The outcome is the share of boxes on goals, once all are or after `STEPS`
steps. RAGEN (arXiv 2504.20073) gives this game to language models.
"""

from __future__ import annotations

import random
from functools import lru_cache
from itertools import count
from pathlib import Path
from typing import Any

from tools import Message, Tool, choose, tool

MOVES = {"left": (0, -1), "down": (1, 0), "right": (0, 1), "up": (-1, 0)}
SIZE, WALLS = 4, 2
STEPS = 16
LEVELS = 6  # of each number of boxes
GO = tool("go", "to", list(MOVES), "at")
Place = tuple[int, int]
State = tuple[Place, frozenset[Place]]  # player, boxes
BEST = 1.0


def inside(place: Place, walls: frozenset[Place]) -> bool:
    return all(0 <= x < SIZE for x in place) and place not in walls


def moved(state: State, way: str, walls: frozenset[Place]) -> State:
    player, boxes = state
    ahead, beyond = ((player[0] + n * MOVES[way][0], player[1] + n * MOVES[way][1]) for n in (1, 2))
    if not inside(ahead, walls):
        return state
    if ahead not in boxes:
        return ahead, boxes
    if not inside(beyond, walls) or beyond in boxes:
        return state
    return ahead, boxes - {ahead} | {beyond}


class Level:
    """A level, and what can be reached in it."""

    def __init__(self, boxes: int, seed: int) -> None:
        places = [(row, column) for row in range(SIZE) for column in range(SIZE)]
        self.name = str(seed)
        drawn = random.Random(f"{boxes}/{seed}").sample(places, 1 + 2 * boxes + WALLS)
        self.start: State = (drawn[0], frozenset(drawn[1 : 1 + boxes]))
        self.goals = frozenset(drawn[1 + boxes : 1 + 2 * boxes])
        self.walls = frozenset(drawn[1 + 2 * boxes :])

    def score(self, state: State) -> float:
        return len(state[1] & self.goals) / len(self.goals)

    @lru_cache(None)  # noqa: B019 - there are few levels
    def value(self, state: State, left: int, uniform: bool) -> float:
        """The outcome after so many steps, by the best or by any; a faster one is worth more."""
        if self.score(state) == 1.0 or not left:
            return self.score(state) + (0.0 if uniform else 1e-3 * left)
        values = [self.value(moved(state, way, self.walls), left - 1, uniform) for way in MOVES]
        return sum(values) / len(values) if uniform else max(values)

    def shown(self, state: State) -> str:
        player, *boxes = (
            "abcd"[row] + str(column) for row, column in (state[0], *sorted(state[1]))
        )
        return "at " + "-".join((self.name, player, *boxes))


def solvable(boxes: int) -> list[Level]:
    """The first levels whose boxes have all to be pushed, and can be in three to six steps."""
    found: list[Level] = []
    for seed in count():
        level = Level(boxes, seed)
        value = level.value(level.start, STEPS, False)
        if level.score(level.start) == 0 and 1 + 1e-3 * (STEPS - 6) <= value <= 1 + 1e-3 * (
            STEPS - 3
        ):
            found.append(level)
            if len(found) == LEVELS:
                return found
    raise AssertionError


ALL = {boxes: solvable(boxes) for boxes in (1, 2)}


async def agent(task: dict[str, Any]) -> float:
    """The outcome. Every step is a conversation of its own, which says all."""
    level = ALL[task["boxes"]][task["level"]]
    state = level.start
    for _ in range(STEPS):
        messages: list[Message] = [{"role": "system", "content": "sokoban"}]
        messages.append({"role": "user", "content": level.shown(state)})
        _, way = await choose(messages, GO)
        state = moved(state, way, level.walls) if way else state
        if level.score(state) == 1.0:
            break
    return level.score(state)


def verify(result: float) -> float:
    return result


def best(messages: list[Message], tools: list[Tool]) -> tuple[str, str]:
    level, state = read(messages[-1]["content"])
    return "go", max(
        MOVES, key=lambda way: level.value(moved(state, way, level.walls), STEPS, False)
    )


def read(text: str) -> tuple[Level, State]:
    seed, player, *boxes = text.split()[1].split("-")
    places = (
        ["abcd".index(row) for row, _ in (player, *boxes)],
        [int(n) for _, n in (player, *boxes)],
    )
    first, *others = zip(*places, strict=True)
    (level,) = (one for one in ALL[len(boxes)] if one.name == seed)
    return level, (first, frozenset(others))


def random_score(boxes: int) -> float:
    levels = ALL[boxes]
    return sum(level.value(level.start, STEPS, True) for level in levels) / len(levels)


def tasks(boxes: int, times: int) -> list[dict[str, Any]]:
    return [
        {"id": f"{boxes}/{level}/{n}", "input": {"boxes": boxes, "level": level}}
        for n in range(times)
        for level in range(LEVELS)
    ]


train1, heldout1 = tasks(1, 1), tasks(1, 11)
train2, heldout2 = tasks(2, 1), tasks(2, 11)


def build1(folder: Path, seed: int) -> None:
    from policies import build

    build(agent, best, train1, 0.2, folder, seed)


def build2(folder: Path, seed: int) -> None:
    from policies import build

    build(agent, best, train2, 0.2, folder, seed)
