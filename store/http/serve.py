"""Runs the store's server: one event loop in each of its processes, until SIGTERM."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
import socket
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from agentrl.asgi import server as asgi_server
from agentrl.asgi.server import AsgiServer, run_loop
from agentrl.base.access import is_loopback_host
from agentrl.base.processes import seal
from agentrl.errors import AgentRLError, ConfigError, StoreError, user_message
from agentrl.store.base import Store
from agentrl.store.http.keys import VARIABLE, KeyFile, Keys
from agentrl.store.http.server import StoreApp
from agentrl.store.http.workers import Workers, end_with_parent
from agentrl.store.sql.maintenance import limits
from agentrl.store.sql.store import SqlStore

log = logging.getLogger("agentrl.store")


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
    """Serve, with limits of connections that apply to the peer, which may be a proxy."""
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
    largest: int,
    retention: Retention | None = None,
    processes: int = 1,
) -> None:
    """Open the store, print the server's address and serve with this many processes, of which this
    is one. Raises Invalid for invalid limits of `retention`."""
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
                    work = partial(run_worker, store, keys, largest)
                    await stack.enter_async_context(Workers(processes - 1, work, listening))
                if retention is not None:
                    keeping = asyncio.create_task(retention.keep(opened))
                    stack.push_async_callback(ended, keeping)
                await serve(StoreApp(opened, keys, largest=largest), listening, ready)

        run_loop(main())


def run_worker(
    store: Callable[[], Store], keys: Keys | KeyFile, largest: int, listening: socket.socket
) -> None:
    """Serve as one of several processes, until SIGTERM or the end of the one that started it."""
    seal()

    def ready(server: AsgiServer) -> None:
        end_with_parent(lambda: server.handle_exit(signal.SIGTERM, None))

    async def main() -> None:
        async with store() as opened:
            await serve(StoreApp(opened, keys, largest=largest), listening, ready)

    try:
        run_loop(main())
    except AgentRLError as error:
        log.warning("worker: %s", user_message(error))
        sys.exit(1)


async def ended(task: asyncio.Task[None]) -> None:
    task.cancel()
    await asyncio.wait((task,))
