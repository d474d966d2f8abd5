"""Several processes serve one store at one address."""

from __future__ import annotations

import asyncio
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from agentrl.core.errors import Unavailable
from agentrl.store import open_store
from agentrl.store.http import serve
from agentrl.store.http.keys import Keys

ROLLOUTS = 240


@pytest.fixture
def server(tmp_path: Path) -> Iterator[tuple[str, psutil.Popen]]:
    """Address and process of a server with two workers."""
    command = [sys.executable, "-m", "agentrl", "store", "serve", str(tmp_path / "store.db")]
    options = ["--port", "0", "--processes", "3"]
    with psutil.Popen([*command, *options], stdout=subprocess.PIPE, text=True) as process:
        try:
            yield process.stdout.readline().split()[-1], process
        finally:
            for one in [*process.children(), process] if process.is_running() else []:
                one.kill()


def is_worker(process: psutil.Process) -> bool:
    try:
        return "spawn_main" in str(process.cmdline())
    except psutil.Error:  # it has just ended
        return False


async def workers(process: psutil.Popen, n: int = 2) -> list[psutil.Process]:
    """Wait for n workers."""
    async with asyncio.timeout(60):
        while True:
            found = [child for child in process.children() if is_worker(child)]
            if len(found) >= n:
                return found
            await asyncio.sleep(0.05)


async def test_calls_survive_the_death_of_workers(server, kit) -> None:
    address, process = server
    dead: set[int] = set()

    async def work(number: int) -> None:
        async with open_store(address) as store:
            while claimed := await store.claim(1, runner=f"r{number}", lease=60):
                (attempt,) = claimed
                await store.add_transitions([kit.call(attempt, [1], [2])])
                await store.finish([kit.good(attempt)])
                await asyncio.sleep(0.05)

    async def kill() -> None:
        for _ in range(3):
            victim = next(w for w in await workers(process) if w.pid not in dead)
            dead.add(victim.pid)
            victim.send_signal(signal.SIGKILL)
            await asyncio.sleep(0.3)

    async with open_store(address) as store:
        await store.open_run("run", {})
        await store.enqueue(kit.group("group", ROLLOUTS))
        await workers(process)
        await asyncio.gather(kill(), *map(work, range(8)))
        counts, rollouts = await store.counts("run"), await store.rollouts("run")
    assert counts.succeeded == ROLLOUTS
    assert len(dead) == 3
    assert [rollout.attempts for rollout in rollouts] == [1] * ROLLOUTS
    assert {worker.pid for worker in await workers(process)}.isdisjoint(dead)


def test_a_worker_is_sealed_and_says_in_one_sentence_why_it_ends(monkeypatch, caplog) -> None:
    """Its environment may hold keys."""
    done = []

    def lost(main) -> None:
        main.close()
        done.append("serve")
        raise Unavailable("the database is away")

    monkeypatch.setattr(serve, "seal", lambda: done.append("seal"))
    monkeypatch.setattr(serve, "run_loop", lost)
    with socket.create_server(("127.0.0.1", 0)) as listening, pytest.raises(SystemExit):
        serve.run_worker(lambda: None, Keys(), listening)
    assert done == ["seal", "serve"]
    assert caplog.messages == ["worker: the database is away"]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
async def test_workers_end_with_their_server(server, number: signal.Signals) -> None:
    _, process = server
    found = await workers(process)
    process.send_signal(number)
    assert process.wait(30) == (0 if number == signal.SIGTERM else -number)
    assert not psutil.wait_procs(found, 30)[1]
