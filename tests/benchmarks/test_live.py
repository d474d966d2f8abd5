"""The benchmark decides as the library does."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from agentrl.core.config.live import PromotionConfig
from agentrl.live.promotion import verdict
from agentrl.live.served import Counted, difference
from tests.agentrl.live.promotion.drawn import drawn
from tests.benchmarks import live_example, live_guard, live_learning, live_promotion


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
    assert live_example.sessions_to([False] * 50 + [True] * 200) == 130
    assert live_example.sessions_to([True] * 79 + [False] * 300) is None


def test_a_section_that_fails_loses_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    async def played(seed: int, *settings: str, name: str = "", **options: Any) -> dict[str, Any]:
        if seed == 1 and not name:
            raise RuntimeError("the agent's machine has no langchain")
        figures = {"last_500": 0.9 if name else 0.88, "sessions_to_80": 500}
        return live_learning.called(figures, name, seed)

    async def by_hand(seed: int, name: str, recipe: Any) -> dict[str, Any]:
        return {f"{name}_sessions {seed}": 1000}

    monkeypatch.setattr(live_learning, "live", played)
    monkeypatch.setattr(live_learning, "by_hand", by_hand)
    found = live_learning.measure((0, 1), ("live", "attack", "offline"))
    assert "langchain" in found["problem live 1"]
    assert found["last_500 without attacker 1"] == 0.9
    assert found["attack_cost 0"] == found["attack_cost"] == 2.0
    assert found["of_offline 0"] == 0.5
    assert "of_offline 1" not in found


@pytest.mark.slow
async def test_the_example_serves_its_customers_and_learns() -> None:
    pytest.importorskip("langchain")
    settings = ("live.sessions=4", "live.every=1")
    found = await live_learning.live(0, *settings, sessions=40, attack=0.5)
    assert found["failed_requests 0"] == 0
    assert found["steps 0"] > 0
