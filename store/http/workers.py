"""Further processes that serve the same store at the same address, to use several cores.

All accept connections from one listening socket. Each opens the store itself: what they share is in
its database. A worker that ends is started again; all end with the process that owns them.
"""

from __future__ import annotations

import asyncio
import logging
import multiprocessing
import socket
import time
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from multiprocessing.process import BaseProcess

SPAWN = multiprocessing.get_context("spawn")  # a fork would copy the store's connections and locks
LOOK_PAUSE = 1.0  # seconds between two looks at the workers
LONGEST_LOOK_PAUSE = 60.0  # the same while they end at once, as without their database
END_PATIENCE = 15.0  # seconds for workers to finish their calls, before they are killed

log = logging.getLogger("agentrl.store")


class Workers(AbstractAsyncContextManager["Workers"]):
    """Runs `work(listening)` in n processes, from `async with` until its end. `work` must be
    picklable, and call `end_with_parent` on its event loop."""

    def __init__(self, n: int, work: Callable[[socket.socket], None], listening: socket.socket):
        self._n, self._work, self._listening = n, work, listening
        self._running: list[BaseProcess] = []

    async def __aenter__(self) -> Workers:
        self._running += (self._start() for _ in range(self._n))
        self._keeping = asyncio.create_task(self._keep())
        return self

    async def __aexit__(self, *_: object) -> None:
        self._keeping.cancel()
        await asyncio.wait((self._keeping,))
        for process in self._running:
            process.terminate()
        deadline = time.monotonic() + END_PATIENCE
        for process in self._running:
            await asyncio.to_thread(process.join, max(0.0, deadline - time.monotonic()))
            process.kill()

    def _start(self) -> BaseProcess:
        process = SPAWN.Process(
            target=self._work, args=(self._listening,), name="store-worker", daemon=True
        )
        process.start()
        return process

    async def _keep(self) -> None:
        """Restart workers that end, until the server closes its socket."""
        pause = LOOK_PAUSE
        while True:
            await asyncio.sleep(pause)
            if self._listening.fileno() < 0:
                return
            ended = [i for i, process in enumerate(self._running) if process.exitcode is not None]
            pause = min(2 * pause, LONGEST_LOOK_PAUSE) if ended else LOOK_PAUSE
            for i in ended:
                code = self._running[i].exitcode
                log.warning("worker ended (exit code %s); restarting it", code)
                try:
                    self._running[i] = self._start()
                except OSError as error:
                    log.warning("no worker could be started: %s", error)


def end_with_parent(end: Callable[[], None]) -> None:
    """Call `end` on the running event loop when the process that started this one has ended."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    loop = asyncio.get_running_loop()

    def ended() -> None:
        loop.remove_reader(parent.sentinel)
        end()

    loop.add_reader(parent.sentinel, ended)
