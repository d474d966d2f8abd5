"""Orders with a month and an amount; each desk is responsible for some months."""

import random
from typing import Any

DESKS = ["north", "south", "east", "west"]
MONTHS = ["jan", "feb", "mar", "apr", "may", "jun", "jul", "aug", "sep", "oct", "nov", "dec"]


def make(n: int, seed: str) -> list[dict[str, Any]]:
    rng = random.Random(seed)
    found = []
    for number in range(n):
        month, cents = rng.randrange(12), rng.randrange(100, 99999)
        text = f"{MONTHS[month]}|{cents / 100:.2f} EUR"
        expected = {"desk": DESKS[month % 4], "line": f"{MONTHS[month]};{cents}#"}
        found.append({"id": f"{seed}-{number}", "input": text, "expected": expected})
    return found


train = make(60, "train")
heldout = make(60, "test")
