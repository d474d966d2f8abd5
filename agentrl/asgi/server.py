"""uvicorn servers: each is an application on one event loop, until SIGTERM."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import socket
import sys
import threading
from collections.abc import Callable, Coroutine, Iterator
from functools import partial
from typing import Protocol, cast

import uvicorn
from starlette.types import Receive, Scope, Send

from agentrl.asgi.connection_limits import ConnectionLimits, LimitedProtocol
from agentrl.base.processes import allow_files
from agentrl.errors import ConfigError

BACKLOG = 4096  # connections waiting to be accepted
OWN_FILES = 256  # file descriptors for the server itself
LONGEST_UNREAD = 60_000  # milliseconds until a response that the client does not read is dropped
SHUTDOWN_GRACE = 10  # seconds for calls in progress after SIGTERM


class DrainingApp(Protocol):
    """An application whose `drain` ends its long polls."""

    def drain(self) -> None: ...
    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None: ...


class AsgiServer(uvicorn.Server):
    """At shutdown, ends the long polls, then waits for calls in progress."""

    def __init__(
        self, app: DrainingApp, ready: Callable[[AsgiServer], None], *, proxied: bool
    ) -> None:
        self._app, self._ready = app, ready
        limits = ConnectionLimits(allow_files() - OWN_FILES)
        super().__init__(
            uvicorn.Config(
                app,
                http=cast(type[asyncio.Protocol], partial(LimitedProtocol, limits)),
                proxy_headers=proxied,
                access_log=False,
                log_level="warning",
                lifespan="off",
                ws="none",
                server_header=False,
                date_header=False,
                backlog=BACKLOG,
                timeout_keep_alive=75,  # longer than the client's, which then closes first
                timeout_graceful_shutdown=SHUTDOWN_GRACE,  # else an incomplete request blocks it
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


def listen(host: str, port: int) -> socket.socket:
    """Create the listening socket. Raises ConfigError if the address is unusable."""
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
        listening.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, LONGEST_UNREAD)
    return listening


async def serve(
    app: DrainingApp,
    listening: socket.socket,
    ready: Callable[[AsgiServer], None] = lambda _: None,
    *,
    proxied: bool = True,
) -> None:
    """Serve until SIGTERM, SIGINT or `should_exit` of the server, which is passed to `ready`. Calls
    in progress are finished, unless they take longer than SHUTDOWN_GRACE. proxied: whether the
    client is who a proxy on this machine says; else limits of connections apply to the proxy."""
    await AsgiServer(app, ready, proxied=proxied).serve([listening])


def run_loop(main: Coroutine[None, None, None]) -> None:
    """Run on uvloop if it is installed."""
    factory = uvicorn.Config("", loop="auto").get_loop_factory()
    with asyncio.Runner(loop_factory=factory) as runner:
        runner.run(main)
