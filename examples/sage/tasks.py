"""Training tasks: walks of one move as examples to invent from. Held out: longer walks to
answer."""

from __future__ import annotations

import random

from board import LONGEST, MOVES, SIZE, Square, Walk, written

SEEDS, HELDOUT = 500, 200


def walks(seed: str, count: int, moves: range) -> list[Walk]:
    """Random walks; some may be equal."""
    dice = random.Random(seed)
    return [(dice.choices(list(MOVES), k=dice.choice(moves)), anywhere(dice)) for _ in range(count)]


def anywhere(dice: random.Random) -> Square:
    return dice.randrange(SIZE), dice.randrange(SIZE)


train = [
    {"id": str(number), "input": {"seed": written(*walk)}}
    for number, walk in enumerate(walks("train", SEEDS, range(1, 2)))
]
heldout = [
    {"id": question, "input": {"question": question}}
    for question in dict.fromkeys(
        written(*walk) for walk in walks("heldout", HELDOUT, range(3, LONGEST + 1))
    )
]
