"""Choose pairs of rollouts in a group, for stored groups and for those of a training step."""

from __future__ import annotations

import random
from collections.abc import Sequence
from itertools import combinations
from math import isnan
from typing import Literal

How = Literal["extremes", "all", "best-of"]
LEAST_DIFFERENCE = 1e-9  # smaller differences count as ties


def choose_pairs(
    values: Sequence[float], how: How, least: float, per_group: int, seed: str
) -> list[tuple[int, int]]:
    """Indices (better, worse) of pairs whose values differ by at least `least`, and by more than 0.

    extremes: the best and the worst. all: all pairs, the largest gap first. best-of: the best and a
    random other, drawn with `seed`. per_group: most pairs; 0: all. NaN values are in no pair."""
    known = [i for i, value in enumerate(values) if not isnan(value)]
    order = sorted(known, key=lambda i: -values[i])  # ties in order of index
    if len(order) < 2:
        return []
    candidates = [(order[0], order[-1])]
    if how == "all":
        candidates = sorted(combinations(order, 2), key=lambda two: values[two[1]] - values[two[0]])
    elif how == "best-of":
        candidates = [(order[0], random.Random(seed).choice(order[1:]))]
    found = [(a, b) for a, b in candidates if values[a] - values[b] >= max(least, LEAST_DIFFERENCE)]
    return found[: per_group or None]
