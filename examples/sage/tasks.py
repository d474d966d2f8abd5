"""Seeds of one operation to invent from, and programs of two and three to be answered."""

from __future__ import annotations

import random

from lists import LENGTHS, OPERATIONS, WORDS, written


def programs(seed: str, count: int, operations: range) -> list[str]:
    dice = random.Random(seed)
    found: dict[str, None] = {}
    while len(found) < count:
        names = dice.choices(list(OPERATIONS), k=dice.choice(operations))
        found[written(names, dice.sample(WORDS, dice.choice(LENGTHS)))] = None
    return list(found)


train = [{"id": q, "input": {"seed": q}} for q in programs("train", 500, range(1, 2))]
heldout = [{"id": q, "input": {"question": q}} for q in programs("heldout", 200, range(2, 4))]
