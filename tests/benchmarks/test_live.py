"""The benchmark decides as the library does."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from agentrl.live.lanes.comparison import Counted, difference
from agentrl.live.lanes.verdict import verdict
from agentrl.live.records.table import PromotionConfig
from tests.agentrl.live.lanes.drawn import drawn
from tests.benchmarks import live_guard, live_learning, live_promotion


@pytest.mark.parametrize("better", [0.3, -0.3, 0.0])
def test_a_simulated_candidate_is_decided_about_as_a_real_one(better: float) -> None:
    settings = PromotionConfig()
    columns = drawn(np.random.default_rng(3), 60, share=0.2, base=0.5, better=better)
    what, sessions = live_promotion.decided(columns)
    rows = [*map(Counted, *columns)]
    found: Any = None
    for end in range(1, len(rows) + 1):
        if found := verdict(settings, difference(rows[:end], settings.alpha)):
            break
    assert what == (found[0] if found else "")
    assert sessions == sum(row.candidate for row in rows[:end])


def test_what_fails_always_is_back_after_three_calls() -> None:
    assert live_guard.back(0, 0.8, 0.0, 50, failing=1.0) == 3
    assert live_guard.back(0, 0.8, 0.8, 50) is None


def test_sessions_are_counted_until_the_last_hundred_are_good() -> None:
    assert live_learning.sessions_to([False] * 50 + [True] * 200) == 130
    assert live_learning.sessions_to([True] * 79 + [False] * 300) is None


@pytest.mark.slow
async def test_the_example_serves_its_customers_and_learns() -> None:
    pytest.importorskip("langchain")
    settings = ["live.sessions=4", "live.least=2", "live.every=1"]
    found = await live_learning.live(0, settings, sessions=40, attack=0.5)
    assert found["failed"] == 0
    assert len(found["right"]) == 40
    assert found["steps"] > 0
