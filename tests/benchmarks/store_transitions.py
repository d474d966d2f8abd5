"""Transitions per second straight into SQLite: 8 writers, as tasks and as processes.

Every call has 256 prompt and 128 completion tokens, their log-probs and their text; an attempt has
four. The baseline is `sqlite3` alone, writing the same bytes into one table without index, a group
of calls per transaction.
"""

from __future__ import annotations

import asyncio
import multiprocessing
import sqlite3
import tempfile
import time
from collections.abc import Sequence
from multiprocessing.synchronize import Barrier
from pathlib import Path

from agentrl.core.types import Transition
from agentrl.store import Store, open_store
from agentrl.store.sql import traces
from tests.benchmarks import store_load as load
from tests.benchmarks.store import Figures

WRITERS = 8
BATCH = 8  # calls in one verb
CALLS = 4  # of an attempt
GROUP = 256  # calls in one transaction of the baseline


def measure(quick: bool) -> Figures:
    n, repeats = (640, 1) if quick else (16_000, 3)
    figures: Figures = {}
    for name, batch in (("batched", BATCH), ("one_by_one", 1)):
        figures[f"transitions_per_s_{name}"] = best(repeats, tasks, n, batch)
        figures[f"transitions_per_s_{name}_{WRITERS}_processes"] = best(
            repeats, processes, n, batch
        )
    figures["baseline_sqlite3_per_s"] = best(repeats, baseline, n)
    figures["ratio_to_baseline"] = float(figures["transitions_per_s_batched"]) / float(
        figures["baseline_sqlite3_per_s"]
    )
    return figures


def best(repeats: int, run, n: int, *more: int) -> float:
    """Calls per second of the best of several runs, each into a new store."""
    rates = []
    for _ in range(repeats):
        with tempfile.TemporaryDirectory() as folder:
            rates.append(n / run(str(Path(folder) / "store.db"), n, *more))
    return max(rates)


def tasks(path: str, n: int, batch: int) -> float:
    async def run() -> float:
        async with open_store(path) as store:
            attempts = await claimed(store, n)
            calls = [records(attempts[i::WRITERS]) for i in range(WRITERS)]
            started = time.perf_counter()
            await asyncio.gather(*(write(store, mine, batch) for mine in calls))
            return time.perf_counter() - started

    return asyncio.run(run())


def processes(path: str, n: int, batch: int) -> float:
    async def prepare() -> list[str]:
        async with open_store(path) as store:
            return await claimed(store, n)

    attempts = asyncio.run(prepare())
    context = multiprocessing.get_context("spawn")
    ready = context.Barrier(WRITERS + 1)
    peers = [
        context.Process(target=peer, args=(path, attempts[i::WRITERS], batch, ready))
        for i in range(WRITERS)
    ]
    for process in peers:
        process.start()
    ready.wait(60)
    started = time.perf_counter()
    ready.wait(300)
    seconds = time.perf_counter() - started
    for process in peers:
        process.join()
    return seconds


def peer(path: str, attempts: list[str], batch: int, ready: Barrier) -> None:
    async def run() -> None:
        async with open_store(path) as store:
            calls = records(attempts)
            ready.wait(60)
            await write(store, calls, batch)
            ready.wait(300)

    asyncio.run(run())


async def claimed(store: Store, n: int) -> list[str]:
    """Attempts that take `n` calls."""
    await store.open_run("run", {})
    await store.enqueue(load.rollouts("bench", n // CALLS))
    return [one.id for one in await store.claim(n // CALLS, runner="bench", lease=3600)]


def records(attempts: Sequence[str]) -> list[Transition]:
    return [call for attempt in attempts for call in load.calls(attempt, CALLS)]


async def write(store: Store, calls: Sequence[Transition], batch: int) -> None:
    for i in range(0, len(calls), batch):
        kept = await store.add_transitions(calls[i : i + batch])
        assert all(kept)


def baseline(path: str, n: int) -> float:
    calls = [traces.prepare(call) for call in records([str(i) for i in range(n // CALLS)])]
    lines = [
        (c.columns["id"], c.prompt, c.columns["completion"], c.columns["logprobs"], c.chat)
        for c in calls
    ]
    conn = sqlite3.connect(path, isolation_level=None)
    conn.execute("pragma journal_mode = wal")
    conn.execute("pragma synchronous = normal")
    conn.execute("create table calls (id text, prompt blob, completion blob, logprobs blob, chat)")
    started = time.perf_counter()
    for i in range(0, n, GROUP):
        conn.execute("begin immediate")
        conn.executemany("insert into calls values (?, ?, ?, ?, ?)", lines[i : i + GROUP])
        conn.execute("commit")
    seconds = time.perf_counter() - started
    conn.close()
    return seconds
