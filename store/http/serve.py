"""`agentrl store serve`: one event loop in each of the server's processes, until SIGTERM.

Several processes use several cores. All accept connections from one listening socket. Each opens
the store itself and shares nothing but the database. A worker that ends is restarted; all end with
the process that started them.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import multiprocessing
import signal
import socket
import sys
import time
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from functools import partial
from multiprocessing.process import BaseProcess

from agentrl.core import asgi as asgi_server
from agentrl.core.access import is_loopback_host
from agentrl.core.asgi import AsgiServer, run_loop
from agentrl.core.errors import AgentRLError, ConfigError, StoreError, user_message
from agentrl.core.processes import seal
from agentrl.store.base import Store
from agentrl.store.http.keys import VARIABLE, KeyFile, Keys
from agentrl.store.http.server import StoreApp
from agentrl.store.sql.maintenance import limits
from agentrl.store.sql.store import SqlStore


def listen(host: str, port: int, keys: Keys | KeyFile) -> socket.socket:
    """Create the listening socket. Raises ConfigError if the address is unusable, or other machines
    could reach a server without keys."""
    if not keys and not is_loopback_host(host):
        raise ConfigError(
            f"--host {host}: other machines could write to the store; give keys with --keys FILE or"
            f" {VARIABLE}, or bind to 127.0.0.1"
        )
    return asgi_server.listen(host, port)


async def serve(
    app: StoreApp, listening: socket.socket, ready: Callable[[AsgiServer], None]
) -> None:
    """Serve. Limits of connections apply to the peer, which may be a proxy."""
    await asgi_server.serve(app, listening, ready, proxied=False)


@dataclass(frozen=True, slots=True)
class Retention:
    """Automatic pruning of a served store, with the limits of `Store.prune`."""

    keep_last: int | None
    older_than: float | None  # seconds
    every: float = 3600.0  # seconds

    async def keep(self, store: Store) -> None:
        """Prune periodically, until cancelled."""
        while True:
            try:
                pruned = await store.prune(keep_last=self.keep_last, older_than=self.older_than)
                if pruned.rollouts or pruned.events:
                    log.warning("pruned %d rollouts, %d events", pruned.rollouts, pruned.events)
            except StoreError as error:
                log.warning("nothing was pruned: %s", error)
            await asyncio.sleep(self.every)


def run(
    store: Callable[[], Store],
    host: str,
    port: int,
    keys: Keys | KeyFile,
    *,
    retention: Retention | None = None,
    processes: int = 1,
) -> None:
    """Open the store, print the server's address and serve with `processes` processes, including
    this one. Raises Invalid for invalid limits of `retention`."""
    if retention is not None:
        limits(0.0, None, retention.keep_last, retention.older_than)
    with listen(host, port, keys) as listening:
        bound = listening.getsockname()[1]

        def ready(_: AsgiServer) -> None:
            print(f"Serving at http://{f'[{host}]' if ':' in host else host}:{bound}", flush=True)

        async def main() -> None:
            async with store() as opened, contextlib.AsyncExitStack() as stack:
                if isinstance(opened, SqlStore):  # runners could not renew leases meanwhile
                    await opened.extend_leases()
                if processes > 1:
                    work = partial(run_worker, store, keys)
                    await stack.enter_async_context(Workers(processes - 1, work, listening))
                if retention is not None:
                    keeping = asyncio.create_task(retention.keep(opened))
                    stack.push_async_callback(ended, keeping)
                await serve(StoreApp(opened, keys), listening, ready)

        run_loop(main())


def run_worker(store: Callable[[], Store], keys: Keys | KeyFile, listening: socket.socket) -> None:
    """Serve as one of several processes, until SIGTERM or the end of the one that started it."""
    seal()

    def ready(server: AsgiServer) -> None:
        end_with_parent(lambda: server.handle_exit(signal.SIGTERM, None))

    async def main() -> None:
        async with store() as opened:
            await serve(StoreApp(opened, keys), listening, ready)

    try:
        run_loop(main())
    except AgentRLError as error:
        log.warning("worker: %s", user_message(error))
        sys.exit(1)


async def ended(task: asyncio.Task[None]) -> None:
    task.cancel()
    await asyncio.wait((task,))


SPAWN = multiprocessing.get_context("spawn")  # a fork would copy the store's connections and locks
CHECK_PAUSE = 1.0  # seconds between two checks of the workers
MAX_CHECK_PAUSE = 60.0  # seconds, while workers end immediately, for example without their database
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
        pause = CHECK_PAUSE
        while True:
            await asyncio.sleep(pause)
            if self._listening.fileno() < 0:
                return
            ended = [i for i, process in enumerate(self._running) if process.exitcode is not None]
            pause = min(2 * pause, MAX_CHECK_PAUSE) if ended else CHECK_PAUSE
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
