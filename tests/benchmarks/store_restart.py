"""Seconds until a store of 1,000,000 rollouts answers again after `kill -9` under load.

A process writes calls as fast as it can and is killed, which leaves a write-ahead log to recover.
The clock runs from opening the store, in a process that has imported everything, to the first
claim, counts and write; the whole command, interpreter included, is given too. The baseline is an
empty store.
"""

from __future__ import annotations

import asyncio
import itertools
import multiprocessing
import os
import subprocess
import sys
import tempfile
import time
from multiprocessing.synchronize import Event
from pathlib import Path

from agentrl.store import open_store
from tests.benchmarks import store_load as load
from tests.benchmarks.store import Figures

ANSWER = """
import asyncio, sys
from agentrl.store import open_store
async def main():
    async with open_store(sys.argv[1]) as store:
        assert len(await store.claim(1, runner="r", lease=60)) == 1
        print("answered", flush=True)
asyncio.run(main())
"""


def measure(quick: bool) -> Figures:
    large, repeats = (20_000, 1) if quick else (1_000_000, 5)
    figures: Figures = {}
    with tempfile.TemporaryDirectory() as folder:
        for size in (1_000, large):
            path = str(load.filled(Path(folder) / f"{size}.db", size))
            killed = [kill_and_answer(path) for _ in range(repeats)]
            figures[f"restart_s_{size}"] = max(seconds for seconds, _ in killed)
            figures[f"recovered_log_mb_{size}"] = max(log for _, log in killed) / 1e6
            figures[f"restart_s_{size}_whole_command"] = command(path)
    return figures


def kill_and_answer(path: str) -> tuple[float, int]:
    """Seconds to the first answers, and bytes of log that were left behind."""
    context = multiprocessing.get_context("spawn")
    busy = context.Event()
    process = context.Process(target=write, args=(path, busy), daemon=True)
    process.start()
    assert busy.wait(60)
    process.kill()
    process.join()
    log = Path(f"{path}-wal").stat().st_size
    return asyncio.run(answer(path)), log


def write(path: str, busy: Event) -> None:
    async def run() -> None:
        async with open_store(path) as store:
            attempts = await store.claim(8, runner="bench", lease=3600)
            for number in itertools.count():
                calls = [load.calls(one.id, 1, f"{os.getpid()}-{number}-") for one in attempts]
                await asyncio.gather(*(store.add_transitions(list(call)) for call in calls))
                if number == 400:  # the log is as long as it gets
                    busy.set()

    asyncio.run(run())


async def answer(path: str) -> float:
    started = time.perf_counter()
    async with open_store(path) as store:
        assert len(await store.claim(1, runner="bench", lease=60)) == 1
        assert (await store.counts("run")).queued > 0
        await store.log("run", 0, {"alive": 1.0})
        return time.perf_counter() - started


def command(path: str) -> float:
    started = time.perf_counter()
    process = subprocess.Popen(
        [sys.executable, "-c", ANSWER, path], stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "answered\n"
    seconds = time.perf_counter() - started
    process.communicate()
    return seconds
