"""Rewards of roles from the values of coalitions: pure functions, also for verifiers."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable
from functools import cache
from itertools import permutations

from agentrl.config.learning import EXACT_ROLES

Coalition = frozenset[str]
Value = Callable[[Coalition], float]
"""The value of the team if only these roles take part. The function decides what replaces an absent
role, such as an empty or a default message."""


def difference(value: Value, roles: Iterable[str]) -> dict[str, float]:
    """v(team) - v(team without the role). Wolpert and Tumer 2001."""
    team = frozenset(roles)
    whole = value(team)
    return {role: whole - value(team - {role}) for role in sorted(team)}


def shapley(
    value: Value, roles: Iterable[str], *, samples: int = 0, seed: int | str = 0
) -> dict[str, float]:
    """Role -> its mean marginal contribution over orders of joining: all orders for up to 4 roles,
    else `samples` of them drawn with `seed`.

    Evaluates each coalition once. The values sum to v(team) - v(empty) in either case. Raises
    ValueError for more than 4 roles without samples."""
    names = sorted(set(roles))
    worth = cache(value)
    added = dict.fromkeys(names, 0.0)
    orders = _orders(names, samples, seed)
    for order in orders:
        for index, role in enumerate(order):
            before = frozenset(order[:index])
            added[role] += worth(before | {role}) - worth(before)
    return {role: total / len(orders) for role, total in added.items()}


def _orders(names: list[str], samples: int, seed: int | str) -> list[tuple[str, ...]]:
    if len(names) <= EXACT_ROLES:
        return list(permutations(names))
    if samples < 1:
        raise ValueError(
            f"{len(names)} roles can join in too many orders to take them all; set samples"
        )
    rng = random.Random(seed)
    return [tuple(rng.sample(names, len(names))) for _ in range(samples)]
