"""Rewards made from rewards: the worked numbers of the literature and the degenerate groups."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from statistics import fmean

import pytest

from agentrl.algorithms.credit.core import AllFilters
from agentrl.algorithms.data.batch import Batch
from agentrl.algorithms.zoo.baselines.grpo import NotTruncated, OverlongPenalty
from agentrl.algorithms.zoo.teams.roles import RoleFilter
from tests.algorithms.worlds import Call, Play, world


def group(*outcomes: float, tokens: Sequence[int] | None = None, greedy: int = -1) -> Batch:
    sizes = tokens or [1] * len(outcomes)
    return world(
        *(
            Play([Call(tokens=n)], outcome=o, greedy=i == greedy)
            for i, (o, n) in enumerate(zip(outcomes, sizes, strict=True))
        )
    )


def subsets(outcomes: Sequence[int], i: int, k: int) -> float:
    """What the k-subsets with rollout i come to, less k / n of the mean of those without it."""
    n = len(outcomes)
    every = list(itertools.combinations(range(n), k))
    won = {subset: max(outcomes[j] for j in subset) for subset in every}
    without = [won[subset] for subset in every if i not in subset]
    return sum(won[s] for s in every if i in s) / len(every) - k / n * fmean(without)


def test_overlong() -> None:
    """A11: M = 10, c = 4."""
    lengths = [5, 6, 7, 8, 10, 11]
    shaped = OverlongPenalty("outcome", 10, 4)(group(*[1.0] * 6, tokens=lengths))
    assert (shaped - 1).tolist() == pytest.approx([0, 0, -0.25, -0.5, -1, -1])


def test_filters() -> None:
    batch = world(
        Play([Call(truncated=True), Call(role="b")], outcome=1.0),
        Play([Call(role="b", truncated=True)], outcome=0.0),
    )
    assert NotTruncated()(batch).tolist() == [True, True, False]
    assert AllFilters((NotTruncated(), RoleFilter(("b",))))(batch).tolist() == [False, True, False]


def test_an_overlong_cache_beyond_the_limit_is_all_of_it() -> None:
    shaped = OverlongPenalty("outcome", 8, 4096)(group(1.0, 1.0, 1.0, tokens=[2, 4, 8]))
    assert (shaped - 1).tolist() == pytest.approx([-0.25, -0.5, -1])
