"""Products of two numbers, too large for a small model's head. No product is asked for twice."""

from __future__ import annotations

import random
from itertools import product
from typing import TypedDict


class Task(TypedDict):
    id: str
    input: str  # the only field that the agent sees
    answer: int  # for the verifier
    factors: list[int]  # for the demonstrations


def task(a: int, b: int) -> Task:
    return Task(id=f"{a}x{b}", input=f"What is {a} times {b}?", answer=a * b, factors=[a, b])


everything = [task(a, b) for a, b in product(range(11, 100), repeat=2)]
random.Random(0).shuffle(everything)
train, heldout = everything[:128], everything[128:192]
