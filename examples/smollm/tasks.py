"""Short price lists, and a question about one line.

No thing on a held-out list is on a training list.
"""

from __future__ import annotations

import random
from typing import TypedDict

KNOWN = "lamp chair desk clock mirror carpet vase kettle basket towel pillow bench shelf stool"
NEW = "candle ladder barrel cushion curtain drawer bucket blanket"
LINES = 3


class Task(TypedDict):
    id: str
    input: str  # the only field that the agent sees
    answer: int  # for the verifier


def questions(count: int, things: list[str], seed: int) -> list[Task]:
    rng = random.Random(seed)
    return [question(f"{seed}/{number}", things, rng) for number in range(count)]


def question(name: str, things: list[str], rng: random.Random) -> Task:
    """lamp: 48 dollars ... What does the lamp cost?"""
    prices = dict(zip(rng.sample(things, LINES), rng.sample(range(10, 100), LINES), strict=True))
    asked = rng.choice(list(prices))
    lines = [f"{thing}: {price} dollars" for thing, price in prices.items()]
    text = "\n".join([*lines, f"What does the {asked} cost?"])
    return Task(id=name, input=text, answer=prices[asked])


train = questions(128, KNOWN.split(), seed=0)
heldout = questions(64, NEW.split(), seed=1)
