"""Training tasks are walks of one move, as examples for inventing new ones; held-out tasks are
longer walks to answer."""

from __future__ import annotations

import random

from board import MAX_MOVES, MOVES, SIZE, Square, Walk, written

SEEDS, HELDOUT = 500, 200


def walks(seed: str, count: int, moves: range) -> list[Walk]:
    """Random walks; some may be equal."""
    rng = random.Random(seed)
    return [(rng.choices(list(MOVES), k=rng.choice(moves)), anywhere(rng)) for _ in range(count)]


def anywhere(rng: random.Random) -> Square:
    return rng.randrange(SIZE), rng.randrange(SIZE)


train = [
    {"id": str(number), "input": {"seed": written(*walk)}}
    for number, walk in enumerate(walks("train", SEEDS, range(1, 2)))
]
heldout = [
    {"id": question, "input": {"question": question}}
    for question in dict.fromkeys(
        written(*walk) for walk in walks("heldout", HELDOUT, range(3, MAX_MOVES + 1))
    )
]
