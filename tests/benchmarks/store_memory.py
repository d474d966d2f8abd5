"""Does a process that records stay flat? Memory after the first tenth against after all of it.

python -m tests.benchmarks.store_memory --json
"""

from __future__ import annotations

import asyncio
import gc
import tempfile
from pathlib import Path

import psutil

from agentrl.store import Store, open_store
from tests.benchmarks.report import arguments, report
from tests.benchmarks.store_load import calls, rollouts

CALLS = 20  # of one attempt
TOGETHER = 8  # attempts at a time


def measure(quick: bool) -> dict[str, float]:
    """Records 100,000 transitions (quick: 20,000). `memory_growth_mb` is what the resident set of
    the process gained after a tenth of them, when caches are full."""
    with tempfile.TemporaryDirectory() as folder:
        return asyncio.run(record(Path(folder) / "store.db", 20_000 if quick else 100_000))


async def record(path: Path, n: int) -> dict[str, float]:
    async with open_store(str(path)) as store:
        await store.open_run("run", {})
        await _record(store, "warm", n // 10)
        warm = _resident()
        await _record(store, "rest", n - n // 10)
        grown = _resident()
        stored = (await store.stats()).bytes / 1e6
    return {
        "memory_transitions": n,
        "memory_warm_mb": warm,
        "memory_growth_mb": grown - warm,
        "memory_stored_mb": stored,
    }


async def _record(store: Store, name: str, n: int) -> None:
    await store.enqueue(rollouts(name, n // CALLS))
    while attempts := await store.claim(TOGETHER, runner="bench", lease=600):
        await asyncio.gather(*(_attempt(store, attempt.id) for attempt in attempts))


async def _attempt(store: Store, attempt: str) -> None:
    for call in calls(attempt, CALLS):
        await store.add_transitions([call])


def _resident() -> float:
    """Megabytes."""
    gc.collect()
    return psutil.Process().memory_info().rss / 1e6


def main() -> None:
    parser = arguments(__doc__)
    parser.add_argument("--quick", action="store_true")
    options = parser.parse_args()
    result = measure(options.quick)
    report(result, as_json=options.json)


if __name__ == "__main__":
    main()
