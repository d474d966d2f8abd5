"""A shop with a fixed catalogue: search, open, buy. The outcome is graded, as in WebShop (arXiv
2207.01206): the share of what was asked for that the bought thing has.

A customer wants a thing of some colour, made of some material. A search for a word lists the
numbers of all that have it; a page says what a number is. Nobody can know the catalogue by heart
from the customer's words alone: the numbers have to be found. Held-out customers want what no
training customer wants.
"""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

from tools import Message, Tool, answer_tool, choose, tool

THINGS = ["lamp", "chair", "bag", "cup"]
COLOURS = ["red", "blue", "green"]
MATERIALS = ["wood", "steel"]
STEPS = 5  # calls; what is not bought by then is not bought
BEST = 1.0
ALL = [(t, c, m) for t in THINGS for c in COLOURS for m in MATERIALS]
random.Random("shop").shuffle(ALL)
NUMBERS = [f"n{number}" for number in range(len(ALL))]
CATALOGUE = dict(zip(NUMBERS, ALL, strict=True))
SEARCH = tool("search", "word", [*THINGS, *COLOURS, *MATERIALS])
OPEN, BUY = tool("open", "number", NUMBERS), tool("buy", "number", NUMBERS)


async def agent(task: str) -> str:
    """The number that was bought, or nothing."""
    messages: list[Message] = [{"role": "system", "content": "shop"}]
    messages.append({"role": "user", "content": f"{task}"})
    for _ in range(STEPS):
        name, given = await choose(messages, SEARCH, OPEN, BUY)
        if name == "buy":
            return given
        if name == "search":
            answer_tool(messages, " ".join(n for n in NUMBERS if given in CATALOGUE[n]))
        elif name == "open":
            answer_tool(messages, f"{given} is {' '.join(CATALOGUE[given])}")
        else:
            answer_tool(messages, "what")
    return ""


def share(number: str, wanted: list[str]) -> float:
    return sum(word in CATALOGUE.get(number, ()) for word in wanted) / len(wanted)


def verify(task: dict[str, Any], result: str) -> float:
    return share(result, task["input"].split())


def best(messages: list[Message], tools: list[Tool]) -> tuple[str, str]:
    """Search for the thing, open what is listed until it is right, buy it."""
    wanted = tuple(messages[1]["content"].split())
    seen = [m["content"].split() for m in messages[2:] if m["role"] == "tool"]
    pages = {words[0]: tuple(words[2:]) for words in seen if words[1:2] == ["is"]}
    for number, page in pages.items():
        if page == wanted:
            return "buy", number
    listed = [n for words in seen if words[1:2] != ["is"] for n in words if n not in pages]
    right = [n for n in listed if CATALOGUE[n] == wanted]
    return ("open", right[0]) if right else ("search", wanted[0])


def random_score() -> float:
    """Any call has the same chance: of all that can be bought the mean share is bought."""
    mean = sum(share(number, list(ALL[0])) for number in NUMBERS) / len(NUMBERS)
    calls = [len(one["function"]["parameters"]["properties"][key]["enum"])
             for one, key in ((SEARCH, "word"), (OPEN, "number"), (BUY, "number"))]  # fmt: skip
    return mean * (1 - (1 - calls[2] / sum(calls)) ** STEPS)


RANDOM = random_score()
WANTED = [" ".join(one) for one in ALL]
train = [{"id": wanted, "input": wanted} for wanted in WANTED[:18]]
heldout = [{"id": f"{w}/{n}", "input": w} for n in range(11) for w in WANTED[18:]]


def build1(folder: Path, seed: int) -> None:
    from policies import build

    build(agent, best, train + heldout, 0.4, folder, seed)
