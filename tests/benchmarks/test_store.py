"""What the store benchmark counts, rather than times, holds on every machine."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from tests.benchmarks import store_bytes, store_kill9, store_load, store_runners


@pytest.mark.slow  # tests/store/test_processes.py kills writers of every backend
def test_kill_9_loses_nothing_and_doubles_nothing() -> None:
    figures = store_kill9.measure(quick=True)
    assert (figures["kill9_lost"], figures["kill9_duplicated"]) == (0, 0)
    assert figures["kills_server"] > 0
    for part in ("", "served_"):
        assert figures[f"{part}acknowledged_calls"] > 0
        assert figures[f"{part}acknowledged_outcomes"] > 0


def test_a_call_costs_what_is_new_however_long_the_conversation() -> None:
    figures = store_bytes.measure(quick=True)
    for turns in store_bytes.TURNS:
        assert figures[f"ratio_{turns}_turns"] <= 1.3
    assert figures["full_prompts_to_stored_50_turns"] > 5


def test_runners_keep_their_leases_under_load(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A lost lease, or an outcome that came too late, fails the load itself."""
    monkeypatch.setattr(store_runners, "SECONDS", 0.2)
    monkeypatch.setattr(store_runners, "BEAT", 0.05)
    path = store_load.filled(tmp_path / "store.db", 4_000)
    figures = asyncio.run(store_runners.runners(str(path), 1.5, n=20))
    for name in ("claim", "outcome", "heartbeat"):
        assert float(figures[f"runners_{name}s_per_s"]) > 10
