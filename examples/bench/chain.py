"""chain-k: k calls of a tool, each of which matters only if all before it were right.

A parcel passes k depots. At each the agent sends it through one of four exits; the right one
depends on the depot and the colour of the parcel. A parcel that left through a wrong exit is lost,
but goes on through as many depots. Held-out parcels are for people whom no training task names.

The outcome is 1 if the parcel arrives. `process_right`, `process_noisy` and `process_misleading`
are rewards of each call: 1 for the right exit; the same, wrong three times in ten; 1 for the exit
after the right one.
"""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

from tools import Message, Tool, answer_tool, choose, tool

from agentrl import Reward, Scope, Trace

EXITS = ["north", "east", "south", "west"]
COLOURS = ["red", "blue", "green", "white"]
PEOPLE = [
    "Ada", "Ben", "Cleo", "Dan", "Eva", "Finn", "Gail", "Hugo",
    "Ines", "Jon", "Kim", "Leo", "Mia", "Noel", "Olga", "Paul",
]  # fmt: skip
MAX_LENGTH = 8
NOISE = 0.3
SEND = tool("send", "exit", EXITS)
BEST = 1.0


def _map() -> list[dict[str, str]]:
    """Of each depot: colour -> exit. Every exit is right for one of them."""
    dice = random.Random("chain")
    return [dict(zip(COLOURS, dice.sample(EXITS, 4), strict=True)) for _ in range(MAX_LENGTH)]


RIGHT = _map()


async def agent(task: dict[str, Any]) -> list[str]:
    """The exits taken."""
    colour, person = task["parcel"].split()
    messages: list[Message] = [{"role": "system", "content": "route"}]
    messages.append({"role": "user", "content": f"depot 1 {colour} {person}"})
    taken, lost = [], False
    for depot in range(task["k"]):
        if depot:
            place = "lost" if lost else "depot"
            answer_tool(messages, f"{place} {depot + 1} {colour} {person}")
        _, way = await choose(messages, SEND)
        taken.append(way)
        lost |= way != RIGHT[depot][colour]
    return taken


def right_way(asked: dict[str, Any]) -> list[str]:
    colour, _ = asked["parcel"].split()
    return [exits[colour] for exits in RIGHT[: asked["k"]]]


def verify(task: dict[str, Any], result: list[str]) -> float:
    return float(result == right_way(task["input"]))


def process(task: dict[str, Any], trace: Trace, noise: float = 0.0, after: int = 0) -> list[Reward]:
    """A reward of each call. noise: how often it is wrong; after: 1 pays the exit after the right
    one."""
    dice = random.Random(trace.rollout.id)
    paid = []
    for call, right in zip(trace.transitions, right_way(task["input"]), strict=True):
        wanted = EXITS[(EXITS.index(right) + after) % 4]
        calls = (call.answer or {}).get("tool_calls") or [{"function": {"arguments": ""}}]
        good = wanted in calls[0]["function"]["arguments"]
        value = float(good != (dice.random() < noise))
        about = {"name": "process", "scope": Scope.TRANSITION, "target": call.id}
        paid.append(Reward(value=value, **about))
    return paid


def process_right(task: dict[str, Any], trace: Trace) -> list[Reward]:
    return process(task, trace)


def process_noisy(task: dict[str, Any], trace: Trace) -> list[Reward]:
    return process(task, trace, noise=NOISE)


def process_misleading(task: dict[str, Any], trace: Trace) -> list[Reward]:
    return process(task, trace, after=1)


def best(messages: list[Message], tools: list[Tool]) -> tuple[str, str]:
    """What is right to do. On a lost parcel nothing is, so anything will do."""
    place, depot, colour, _ = messages[-1]["content"].split()
    exits = EXITS if place == "lost" else [RIGHT[int(depot) - 1][colour]]
    return "send", random.choice(exits)


def random_score(k: int) -> float:
    return 4.0**-k


def tasks(k: int, people: list[str], times: int) -> list[dict[str, Any]]:
    return [
        {"id": f"{k}/{colour}/{person}/{n}", "input": {"k": k, "parcel": f"{colour} {person}"}}
        for n in range(times)
        for person in people
        for colour in COLOURS
    ]


TRAIN, HELD = PEOPLE[:12], PEOPLE[12:]
train2, heldout2 = tasks(2, TRAIN, 1), tasks(2, HELD, 8)
train4, heldout4 = tasks(4, TRAIN, 1), tasks(4, HELD, 8)
train8, heldout8 = tasks(8, TRAIN, 1), tasks(8, HELD, 8)


def build2(folder: Path, seed: int) -> None:
    from policies import build

    build(agent, best, train2 + heldout2, 0.1, folder, seed)


def build4(folder: Path, seed: int) -> None:
    from policies import build

    build(agent, best, train4 + heldout4, 0.4, folder, seed)


def build4_rare(folder: Path, seed: int) -> None:
    """Two parcels in a hundred arrive."""
    from policies import build

    build(agent, best, train4 + heldout4, 0.2, folder, seed)


def build8(folder: Path, seed: int) -> None:
    from policies import build

    build(agent, best, train8 + heldout8, 0.6, folder, seed)
