"""Two lanes are compared at any time, and the chance of an error is the one that was asked for."""

from __future__ import annotations

import itertools
import math
from typing import Any

import numpy as np
import pytest

from agentrl.live import served
from agentrl.live.served import Counted, difference, exceeds, refuted
from tests.agentrl.live.promotion.drawn import drawn

ALPHA = 0.05


def shown(seed: int, null: float = 0.0, **given: Any) -> bool:
    columns = drawn(np.random.default_rng(seed), 100, **given)
    return refuted(columns, null, ALPHA) is not None


@pytest.mark.parametrize("share", [0.1, 0.5])
def test_nobody_gains_by_betting_on_a_difference_that_is_not_there(share: float) -> None:
    """The expected capital after every session, over all that could happen, is exactly 1."""
    serving, better, n = 0.4, 0.2, 4
    expected = np.zeros(n)
    for candidate in itertools.product([False, True], repeat=n):
        for outcome in itertools.product([0.0, 1.0], repeat=n):
            success = [serving + better * lane for lane in candidate]
            chances = [share if lane else 1 - share for lane in candidate]
            chances += [p if y else 1 - p for p, y in zip(success, outcome, strict=True)]
            up, down = served._bets(np.array(candidate), np.array(outcome), np.full(n, share))
            expected += math.prod(chances) * np.exp(served._capital(up, better))
            assert np.isfinite(served._capital(down, -better)).all()  # nobody loses everything
    assert expected == pytest.approx(np.ones(n), abs=1e-12)


@pytest.mark.parametrize("base", [0.5, lambda t: 0.5 + 0.4 * np.sin(t / 150)], ids=["", "drifts"])
def test_equal_lanes_are_told_apart_no_more_often_than_allowed(base: Any) -> None:
    found = sum(shown(seed, share=0.1, base=base, better=0.0) for seed in range(400))
    assert found <= 0.05 * 400


def test_looking_often_fools_a_test_that_allows_one_look() -> None:
    """What the bets are for: the usual test of two proportions, looked at after every session."""
    fooled = 0
    for seed in range(100):
        lanes, outcome, _ = drawn(np.random.default_rng(seed), 100, share=0.5, base=0.5, better=0.0)
        ours, theirs = (np.cumsum(lane) for lane in (lanes, ~lanes))
        means = [
            np.cumsum(outcome * lane) / np.maximum(lane.cumsum(), 1) for lane in (lanes, ~lanes)
        ]
        error = np.sqrt(0.25 / np.maximum(ours, 1) + 0.25 / np.maximum(theirs, 1))
        fooled += bool(((means[0] - means[1]) / error > 1.645)[20:].any())
    assert fooled > 15


def test_the_interval_holds_the_difference_at_every_moment() -> None:
    missed = 0
    for seed in range(200):
        columns = drawn(np.random.default_rng(seed), 60, share=0.2, base=0.3, better=0.15)
        found = difference([*map(Counted, *columns)], ALPHA)  # the ends are those of all moments
        missed += not found.low <= 0.15 <= found.high
    assert missed <= 0.05 * 200


def test_a_better_candidate_is_found() -> None:
    found = sum(shown(seed, share=0.1, base=0.5, better=0.25) for seed in range(50))
    assert found >= 45
    columns = drawn(np.random.default_rng(1), 100, share=0.1, base=0.5, better=0.25, graded=True)
    seen = difference([*map(Counted, *columns)], ALPHA)
    assert 0 < seen.low < 0.25 < seen.high < 0.5
    assert seen.sessions == (100, len(columns[0]) - 100)
    lanes, outcome, share = columns
    back = difference([*map(Counted, ~lanes, outcome, 1 - share)], ALPHA)
    assert (-back.high, -back.low) == pytest.approx((seen.low, seen.high), abs=1e-9)


def test_missing_outcomes_do_not_count_and_others_are_clipped() -> None:
    rows = [Counted(True, 0.5, 0.5), Counted(False, math.nan, 0.5), Counted(False, 7.0, 0.5)]
    found = difference(rows, ALPHA)
    assert found.sessions == (1, 1)
    assert (found.candidate, found.serving, found.clipped) == (0.5, 1.0, 1)
    nothing = difference(rows[1:2], ALPHA)
    assert (nothing.low, nothing.high, nothing.sessions) == (-1.0, 1.0, (0, 0))
    with pytest.raises(ValueError, match="compares nothing"):
        difference([Counted(True, 1.0, 1.0)], ALPHA)


def test_a_rate_above_a_limit_is_shown_soon_and_one_below_seldom() -> None:
    assert exceeds([1.0] * 10, 0.1, 0.01) == 3
    assert exceeds([0.0] * 500, 0.1, 0.01) is None
    assert exceeds([], 0.1, 0.01) is None
    assert exceeds([1.0] * 500, 1.0, 0.01) is None
    draws = [np.random.default_rng(seed).random(300) < 0.1 for seed in range(300)]
    assert sum(exceeds(row.astype(float), 0.1, 0.05) is not None for row in draws) <= 15
