"""Latency of a claim by 50 workers, in a store of 10,000 rollouts and in one of 1,000,000.

The workers claim, finish and enqueue one more as fast as they can, as tasks of one process and as
five processes of ten, so that a claim waits for all that the others ask meanwhile. Figures are the
median of several runs and, since one hiccup of the machine delays fifty claims at once, the worst.
The baseline is one connection of `sqlite3` that does the least a claim needs, alone.
"""

from __future__ import annotations

import asyncio
import multiprocessing
import sqlite3
import tempfile
import time
import uuid
from collections.abc import Callable
from pathlib import Path
from statistics import median

from agentrl.core.types import Outcome
from agentrl.store import Store, open_store
from tests.benchmarks import store_load as load
from tests.benchmarks.store import Figures

WORKERS = 50
PROCESSES = 5
Run = Callable[[Path, int], list[float]]


def measure(quick: bool) -> Figures:
    small, large, rounds, repeats = (2_000, 20_000, 3, 1) if quick else (10_000, 1_000_000, 10, 7)
    figures: Figures = {}
    ways: dict[str, Run] = {"": one_process, "_processes": processes, "_sqlite3_alone": alone}
    with tempfile.TemporaryDirectory() as folder:
        for size in (small, large):
            path = load.filled(Path(folder) / f"{size}.db", size)
            for way, run in ways.items():
                parts = [run(path, rounds) for _ in range(repeats)]
                figures |= percentiles(f"{way}_{size}", parts)
            figures[f"counts_ms_{size}"] = asyncio.run(counts(path))
    for way in ways:
        large_ms, small_ms = (figures[f"claim_p99_ms{way}_{size}"] for size in (large, small))
        figures[f"growth{way}"] = float(large_ms) / float(small_ms)
    return figures


def percentiles(name: str, runs: list[list[float]]) -> Figures:
    def of_runs(share: float) -> list[float]:
        return [1000 * sorted(seconds)[int(len(seconds) * share)] for seconds in runs]

    return {
        f"claim_p50_ms{name}": median(of_runs(0.5)),
        f"claim_p99_ms{name}": median(of_runs(0.99)),
        f"claim_p99_ms{name}_worst_run": max(of_runs(0.99)),
    }


def one_process(path: Path, rounds: int) -> list[float]:
    return asyncio.run(workers(path, WORKERS, rounds))


def processes(path: Path, rounds: int) -> list[float]:
    with multiprocessing.get_context("spawn").Pool(PROCESSES) as pool:
        parts = pool.starmap(peer, [(path, WORKERS // PROCESSES, rounds)] * PROCESSES)
    return [seconds for part in parts for seconds in part]


def peer(path: Path, n: int, rounds: int) -> list[float]:
    return asyncio.run(workers(path, n, rounds))


async def workers(path: Path, n: int, rounds: int) -> list[float]:
    async with open_store(str(path)) as store:
        await asyncio.gather(*(worker(store, 2) for _ in range(n)))  # warm
        parts = await asyncio.gather(*(worker(store, rounds) for _ in range(n)))
    return [seconds for part in parts for seconds in part]


async def worker(store: Store, rounds: int) -> list[float]:
    found = []
    for _ in range(rounds):
        started = time.perf_counter()
        (attempt,) = await store.claim(1, runner="bench", lease=60, claim_id=uuid.uuid4().hex)
        found.append(time.perf_counter() - started)
        assert await store.finish([Outcome(attempt=attempt.id, fence=attempt.fence)]) == [True]
        assert await store.enqueue(load.rollouts(uuid.uuid4().hex, 1)) == 1
    return found


async def counts(path: Path) -> float:
    async with open_store(str(path)) as store:
        await store.counts("run")
        started = time.perf_counter()
        assert (await store.counts("run")).queued > 0
        return 1000 * (time.perf_counter() - started)


def alone(path: Path, rounds: int) -> list[float]:
    conn = sqlite3.connect(path, isolation_level=None)
    conn.execute("pragma synchronous = normal")
    found = []
    for _ in range(rounds * 10):
        started = time.perf_counter()
        conn.execute("begin immediate")
        (seq,) = conn.execute(
            "select seq from rollouts where state = 'queued' order by priority desc, seq limit 1"
        ).fetchone()
        conn.execute("update rollouts set state = 'cancelled' where seq = ?", (seq,))
        conn.execute("commit")
        found.append(time.perf_counter() - started)
    conn.close()
    return found
