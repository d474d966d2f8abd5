"""Other baselines, scales and rewards of groups against their published losses."""

from __future__ import annotations

import itertools
import statistics

from tests.algorithms.presets.padded import (
    CHECKS,
    GREEDY,
    PPO,
    Case,
    Padded,
    centred,
    differs,
    members,
    over_batch,
    plain,
    row_means,
    row_sums,
    tokens,
    tokens_of,
    whiten,
    zscore,
)
from tests.algorithms.presets.plays import checked


def length_weighted(data: Padded) -> dict[int, float]:
    result = {}
    for group in members(data):
        total = sum(tokens_of(data, u) for u, _ in group)
        base = sum(tokens_of(data, u) * r for u, r in group) / total
        result |= {u: r - base if differs(group) else 0.0 for u, r in group}
    return result


def over_mean(data: Padded) -> dict[int, float]:
    mean = centred(data)
    return {
        u: mean[u] / statistics.fmean(x for _, x in group) if mean[u] else 0.0
        for group in members(data)
        for u, _ in group
    }


def gpg(data: Padded) -> dict[int, float]:
    known = sum(len(group) for group in members(data))
    alive = sum(len(group) for group in members(data) if differs(group))
    return {u: a * known / alive for u, a in centred(data).items()}


def two_rewards(data: Padded) -> dict[int, float]:
    first, second = zscore(data), zscore(data, data.style)
    return {u: first.get(u, 0.0) + 0.5 * second.get(u, 0.0) for u in first | second}


def per_call(data: Padded) -> dict[int, float]:
    """Every call counts."""
    result: dict[int, float] = {}
    for group in members(data):
        copies = [r for u, r in group for _ in range(data.rollout.count(u))]
        for u, r in group:
            if len(set(copies)) > 1:
                result[u] = (r - statistics.fmean(copies)) / (statistics.stdev(copies) + 1e-6)
            else:
                result[u] = 0.0
    return result


def against_greedy(data: Padded) -> dict[int, float]:
    result = {}
    for group in members(data):
        greedy = [r for u, r in group if u in GREEDY]
        result |= {u: r - statistics.fmean(greedy) for u, r in group if greedy and u not in GREEDY}
    return result


def best_of(data: Padded) -> dict[int, float]:
    result = {}
    for group in members(data):
        ranked = sorted((r for _, r in group), reverse=True)
        for u, r in group:
            result[u] = 0.0
            if len(ranked) > 1 and r == ranked[0] > ranked[1]:
                result[u] = (ranked[0] - ranked[1]) / (statistics.stdev(ranked) + 1e-6)
    return result


def pass_at_2(data: Padded) -> dict[int, float]:
    """By enumerating the pairs."""
    result = {}
    for group in members(data):
        n = len(group)
        if n < 3:
            continue
        for u, r in group:
            others = [x for v, x in group if v != u]
            won = sum(max(r, x) > 0 for x in others) / (n * (n - 1) / 2)
            without = [max(pair) > 0 for pair in itertools.combinations(others, 2)]
            result[u] = won - 2 / n * statistics.fmean(without)
            result[u] = 0.0 if abs(result[u]) < 1e-9 else result[u]
    return result


CASES: dict[str, Case] = {
    "reinforce++-baseline": (whiten(centred), PPO, tokens, {}),
    "opo": (length_weighted, plain, tokens, {}),
    "gpg": (gpg, plain, tokens, {}),
    "maxrl": (over_mean, PPO, tokens, {}),
    "liteppo": (over_batch, PPO, tokens, {}),
    "gdpo": (whiten(two_rewards), PPO, row_means, {"rewards": {"outcome": 1, "style": 0.5}}),
    "agl-v0": (per_call, PPO, tokens, {}),
    "remax": (against_greedy, plain, row_sums, {}),
    "best-of": (best_of, PPO, row_means, {}),
    "pass-at-k": (pass_at_2, PPO, row_means, {}),
}


test_its_loss_is_the_published_one = checked(CASES, CHECKS)
