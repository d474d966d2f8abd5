"""Seconds until a store of 1,000,000 rollouts answers again after `kill -9` under load.

Calls are written as fast as it goes until somebody is killed, which leaves a write-ahead log to
recover. `restart_s`: the writer is killed, and the clock runs from opening the store, in a process
that has imported everything, to the first claim, counts and write. `served_restart_s`: the server
that the writer talks to is killed, and the clock runs from starting `agentrl store serve`,
interpreter and imports included, to its answer to the first claim. The baseline is a small store.
"""

from __future__ import annotations

import asyncio
import http.client
import itertools
import json
import multiprocessing
import os
import tempfile
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from multiprocessing.synchronize import Event
from pathlib import Path

from agentrl.store import open_store
from tests.benchmarks import store_load as load
from tests.benchmarks.store import Figures


def measure(quick: bool) -> Figures:
    large, repeats = (20_000, 1) if quick else (1_000_000, 5)
    figures: Figures = {}
    with tempfile.TemporaryDirectory() as folder:
        for size in (1_000, large):
            path = str(load.filled(Path(folder) / f"{size}.db", size))
            killed = [kill_and_answer(path) for _ in range(repeats)]
            figures[f"restart_s_{size}"] = max(seconds for seconds, _ in killed)
            figures[f"recovered_log_mb_{size}"] = max(log for _, log in killed) / 1e6
            served = [kill_server_and_answer(path) for _ in range(repeats)]
            figures[f"served_restart_s_{size}"] = max(seconds for seconds, _ in served)
            figures[f"served_recovered_log_mb_{size}"] = max(log for _, log in served) / 1e6
    return figures


def kill_and_answer(path: str) -> tuple[float, int]:
    """Seconds to the first answers, and bytes of log that were left behind."""
    with writing(path):
        pass
    log = Path(f"{path}-wal").stat().st_size
    return asyncio.run(answer(path)), log


def kill_server_and_answer(path: str) -> tuple[float, int]:
    """As above, of the server process; its writer is killed after it."""
    with load.Served(path) as server:
        with writing(server.url):
            server.kill()
        log = Path(f"{path}-wal").stat().st_size
        started = time.perf_counter()
        server.start()
        while not claimed(server.port):
            time.sleep(0.002)
        return time.perf_counter() - started, log


def claimed(port: int) -> bool:
    """Whether anybody answers; the client is a cheap one, whose own start costs nothing."""
    request = '{"n": 1, "runner": "bench", "lease": 60}'
    with closing(http.client.HTTPConnection("127.0.0.1", port, timeout=60)) as connection:
        try:
            headers = {"content-type": "application/json"}
            connection.request("POST", "/v1/claim", request, headers)
        except ConnectionRefusedError:
            return False
        assert len(json.load(connection.getresponse())) == 1
        return True


@contextmanager
def writing(url: str) -> Iterator[None]:
    """While a process writes as much as it can; killed at the end."""
    context = multiprocessing.get_context("spawn")
    busy = context.Event()
    process = context.Process(target=write, args=(url, busy), daemon=True)
    process.start()
    assert busy.wait(120)
    yield
    process.kill()
    process.join()


def write(url: str, busy: Event) -> None:
    async def run() -> None:
        async with open_store(url) as store:
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
