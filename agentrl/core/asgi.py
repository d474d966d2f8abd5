"""uvicorn servers: one event loop until SIGTERM, with limits for each client.

The limits are bytes of headers, the time to send them, and connections. Owns: the idle connections,
those without a complete request. Invariant: an address has at most `MAX_IDLE` of them and the
server at most `max_open` connections in total, because a new connection closes the idle one that
was silent longest, never one whose request is being executed. A client with thousands of incomplete
requests loses these, and cannot lock out others.
"""

from __future__ import annotations

import asyncio
import contextlib
import signal
import socket
import sys
import threading
from collections import defaultdict
from collections.abc import Callable, Coroutine, Iterator
from functools import partial
from typing import Any, Protocol, cast

import uvicorn
from starlette.types import Receive, Scope, Send
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol

from agentrl.core.errors import ConfigError
from agentrl.core.processes import allow_files

BACKLOG = 4096  # connections waiting to be accepted
OWN_FILES = 256  # file descriptors for the server itself
MAX_UNREAD_MS = 60_000  # milliseconds until a response that the client does not read is dropped
SHUTDOWN_GRACE = 10  # seconds for calls in progress after SIGTERM


class DrainingApp(Protocol):
    """An application with a method that ends its long polls."""

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
                # Longer than the client's time-out, so that the client closes first.
                timeout_keep_alive=75,
                # Otherwise an incomplete request would block the shutdown.
                timeout_graceful_shutdown=SHUTDOWN_GRACE,
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
        listening.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, MAX_UNREAD_MS)
    return listening


async def serve(
    app: DrainingApp,
    listening: socket.socket,
    ready: Callable[[AsgiServer], None] = lambda _: None,
    *,
    proxied: bool = True,
) -> None:
    """Serve until SIGTERM, SIGINT or `should_exit` of the server, which is passed to `ready`. Calls
    in progress are finished, unless they take longer than SHUTDOWN_GRACE. proxied: whether limits
    of connections apply to the client that a proxy on this machine reports, rather than to the
    proxy."""
    await AsgiServer(app, ready, proxied=proxied).serve([listening])


def run_loop(main: Coroutine[None, None, None]) -> None:
    """Run on uvloop if it is installed."""
    factory = uvicorn.Config("", loop="auto").get_loop_factory()
    with asyncio.Runner(loop_factory=factory) as runner:
        runner.run(main)


MAX_HEAD_BYTES = 32 * 1024  # bytes of a request without its body
MAX_HEADERS = 100  # headers of a request
MAX_HEAD_SECONDS = 10.0  # seconds to send the headers, or the rest of an unread body
MAX_IDLE = 4096  # connections of one address without a complete request
TOO_LARGE = (
    f"The headers are larger than {MAX_HEAD_BYTES} bytes, or more than {MAX_HEADERS}: send less."
)


class ConnectionLimits:
    """The connections of one server."""

    def __init__(self, max_open: int) -> None:
        """max_open: connections, less than the process's limit of open files."""
        self._max_open, self._open = max_open, 0
        self._idle: defaultdict[str, dict[LimitedProtocol, None]] = defaultdict(dict)

    def entered(self, connection: LimitedProtocol) -> None:
        self._open += 1
        self.idle(connection)
        idle = self._idle[connection.address]
        if len(idle) > MAX_IDLE:
            self._close_oldest(idle)
        elif self._open > self._max_open:
            self._close_oldest(max(self._idle.values(), key=len))

    def idle(self, connection: LimitedProtocol) -> None:
        self._idle[connection.address][connection] = None

    def busy(self, connection: LimitedProtocol) -> None:
        self._idle[connection.address].pop(connection, None)

    def left(self, connection: LimitedProtocol) -> None:
        self._open -= 1
        self.busy(connection)
        if not self._idle[connection.address]:
            del self._idle[connection.address]

    def _close_oldest(self, idle: dict[LimitedProtocol, None]) -> None:
        oldest = next(iter(idle), None)
        if oldest is not None:
            self.busy(oldest)
            oldest.transport.abort()


class LimitedProtocol(HttpToolsProtocol):
    """uvicorn's protocol with limits on the size of headers and the time to send them, not on
    the time for a body: the application reads it."""

    def __init__(self, limits: ConnectionLimits, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._limits, self.address = limits, ""
        self._complete, self._in_head = True, False  # state of the current request
        self._head = self._body = self._framing = 0  # its bytes; framing: all but the body
        self._bodies = 0  # bytes of all bodies: one read may end one and begin another
        self._oversized = False
        self._deadline: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self.address = self.client[0] if self.client else ""
        self._limits.entered(self)
        self._start_clock()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_clock()
        self._limits.left(self)
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        before = self._bodies
        super().data_received(data)
        if self._complete:
            self._framing = 0
        else:
            self._framing += len(data) - (self._bodies - before)
            if self._framing > MAX_HEAD_BYTES + self._body // 8 and not self.transport.is_closing():
                self._oversized = True
                self.send_400_response("")
        self._update_turn()

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._complete, self._in_head = False, True
        self._head = self._body = 0

    def on_header(self, name: bytes, value: bytes) -> None:
        self._head += len(name) + len(value)
        if len(self.headers) >= MAX_HEADERS or self._head > MAX_HEAD_BYTES:
            self._oversized = True
            raise ValueError(TOO_LARGE)  # the parser then calls send_400_response
        super().on_header(name, value)

    def on_headers_complete(self) -> None:
        self._in_head = False
        super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        self._body += len(body)
        self._bodies += len(body)
        super().on_body(body)

    def on_message_complete(self) -> None:
        self._complete = True
        super().on_message_complete()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        self._update_turn()

    def send_400_response(self, msg: str) -> None:
        """Like uvicorn's, but with status 431 for headers that are too large."""
        if not self._oversized:
            super().send_400_response(msg)
            return
        head = f"content-length: {len(TOO_LARGE)}\r\nconnection: close\r\n\r\n{TOO_LARGE}"
        self.transport.write(STATUS_LINE[431] + b"content-type: text/plain\r\n" + head.encode())
        self.transport.close()

    def _update_turn(self) -> None:
        """Update whose turn it is, the server's or the client's, and the client's deadline."""
        answering = self.cycle is not None and not self.cycle.response_complete
        if self.pipeline or (answering and not self.cycle.more_body):
            self._limits.busy(self)
        elif not self.transport.is_closing():
            self._limits.idle(self)
        if self._complete or (answering and not self._in_head):
            self._stop_clock()
        elif self._deadline is None:
            self._start_clock()

    def _start_clock(self) -> None:
        self._deadline = self.loop.call_later(MAX_HEAD_SECONDS, self.transport.abort)

    def _stop_clock(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None
