"""A process that records for weeks does not grow."""

from __future__ import annotations

from pathlib import Path

from tests.benchmarks.store_memory import record


async def test_memory_stays_flat(tmp_path: Path) -> None:
    found = await record(tmp_path / "store.db", 20_000)
    assert found["memory_stored_mb"] > 60  # had it kept what it wrote, it would have grown by this
    assert found["memory_growth_mb"] < 25
