"""Runs the store's server: one event loop in each of its processes, until SIGTERM."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
import socket
import sys
import threading
from collections.abc import Callable, Coroutine, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Protocol, cast

import uvicorn
from starlette.types import Receive, Scope, Send

from agentrl.base.processes import allow_files, seal
from agentrl.errors import AgentRLError, ConfigError, StoreError, user_message
from agentrl.store.base import Store
from agentrl.store.http.keys import VARIABLE, KeyFile, Keys, is_loopback_host
from agentrl.store.http.request_limits import ConnectionLimits, LimitedProtocol
from agentrl.store.http.server import StoreApp
from agentrl.store.http.workers import Workers, end_with_parent
from agentrl.store.sql.maintenance import limits
from agentrl.store.sql.store import SqlStore

log = logging.getLogger("agentrl.store")
BACKLOG = 4096  # connections waiting to be accepted
OWN_FILES = 256  # file descriptors for the server itself
UNREAD = 60_000  # milliseconds until a response that the client does not read is dropped
GRACE = 10  # seconds for calls in progress after SIGTERM


class DrainingApp(Protocol):
    """An application whose `drain` ends its long polls."""

    def drain(self) -> None: ...
    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None: ...


class StoreServer(uvicorn.Server):
    """At shutdown, ends the long polls, then waits for calls in progress."""

    def __init__(self, app: DrainingApp, ready: Callable[[StoreServer], None]) -> None:
        self._app, self._ready = app, ready
        limits = ConnectionLimits(allow_files() - OWN_FILES)
        super().__init__(
            uvicorn.Config(
                app,
                http=cast(type[asyncio.Protocol], partial(LimitedProtocol, limits)),
                proxy_headers=not isinstance(app, StoreApp),  # its limits apply to the peer
                access_log=False,
                log_level="warning",
                lifespan="off",
                ws="none",
                server_header=False,
                date_header=False,
                backlog=BACKLOG,
                timeout_keep_alive=75,  # longer than the client's, which then closes first
                timeout_graceful_shutdown=GRACE,  # else an incomplete request blocks the shutdown
            )
        )

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self._ready(self)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        self._app.drain()
        await super().shutdown(sockets)

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Only request a shutdown: uvicorn's raises the signal again before the store is closed."""
        if threading.current_thread() is threading.main_thread():
            loop = asyncio.get_running_loop()
            for number in (signal.SIGTERM, signal.SIGINT):
                loop.add_signal_handler(number, self.handle_exit, number, None)
        yield


def listen(host: str, port: int, keys: Keys | KeyFile) -> socket.socket:
    """Create the listening socket. Raises ConfigError if the address is unusable, or other machines
    could reach a server without keys."""
    if not keys and not is_loopback_host(host):
        raise ConfigError(
            f"--host {host}: other machines could write to the store; give keys with --keys FILE or"
            f" {VARIABLE}, or bind to 127.0.0.1"
        )
    try:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        listening = socket.create_server((host, port), family=family, backlog=BACKLOG)
    except (OSError, OverflowError) as error:
        raise ConfigError(
            f"the server cannot listen on {host} port {port} ({error}); choose another --port, or 0"
            " for any free one"
        ) from error
    # Connections inherit NODELAY; the event loop sets it only on sockets that it creates. Without
    # it the body of a response, written after the headers, waits 40 ms for their acknowledgement.
    listening.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    if sys.platform.startswith("linux"):
        listening.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, UNREAD)
    return listening


async def serve(
    app: DrainingApp,
    listening: socket.socket,
    ready: Callable[[StoreServer], None] = lambda _: None,
) -> None:
    """Serve until SIGTERM, SIGINT or `should_exit` of the server, which is passed to `ready`. Calls
    in progress are finished, unless they take longer than GRACE."""
    await StoreServer(app, ready).serve([listening])


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

        def ready(_: StoreServer) -> None:
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

    def ready(server: StoreServer) -> None:
        end_with_parent(lambda: server.handle_exit(signal.SIGTERM, None))

    async def main() -> None:
        async with store() as opened:
            await serve(StoreApp(opened, keys, largest=largest), listening, ready)

    try:
        run_loop(main())
    except AgentRLError as error:
        log.warning("worker: %s", user_message(error))
        sys.exit(1)


def run_loop(main: Coroutine[None, None, None]) -> None:
    factory = uvicorn.Config("", loop="auto").get_loop_factory()
    with asyncio.Runner(loop_factory=factory) as runner:
        runner.run(main)


async def ended(task: asyncio.Task[None]) -> None:
    task.cancel()
    await asyncio.wait((task,))
