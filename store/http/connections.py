"""HTTP connections to a store's server: a request is one write, its response mostly one read.

Owns: the idle connections of one event loop. Invariant: a connection has one request at a time; it
is not reused after a cancelled request or a connection error. llhttp reads the responses, as at the
server. (A whole client library, aiohttp, takes more time for a call than the server does: with it
eight processes wrote half as many calls.)
"""

from __future__ import annotations

import asyncio
import ssl
from typing import NamedTuple, cast
from urllib.parse import urlsplit

import httptools

CONNECT_TIMEOUT = 5.0  # seconds to establish a connection
LONGEST_IDLE = 60.0  # seconds for which an idle connection is kept, less than at the server
SIZED = frozenset({b"content-length", b"transfer-encoding"})  # headers that tell a body's end


class NotHttp(Exception):
    """The response is not HTTP."""


class HttpAnswer(NamedTuple):
    status: int
    kind: str  # content type, without its parameters
    body: bytes
    last: bool  # whether the connection cannot be used after it


class Connections:
    """Connections to one server, for one event loop."""

    def __init__(self, url: str) -> None:
        parts = urlsplit(url)
        self._tls = ssl.create_default_context() if parts.scheme == "https" else None
        self._host, self._port = parts.hostname or "", parts.port or (443 if self._tls else 80)
        self._idle: list[_Connection] = []

    async def post(self, head: bytes, body: bytes, silence: float) -> HttpAnswer:
        """Send a request and return its response. Raises OSError (including TimeoutError) if there
        is no server, the connection is lost, or `silence` seconds pass without a byte; NotHttp for
        a response that cannot be read."""
        connection = self._unused() or await self._opened()
        try:
            answer = await connection.post(head, body, silence)  # a future: one coroutine less
        except BaseException:
            connection.abort()
            raise
        if answer.last:
            connection.abort()
        else:
            self._idle.append(connection)
        return answer

    def close(self) -> None:
        while self._idle:
            self._idle.pop().abort()

    def _unused(self) -> _Connection | None:
        """Return the most recently used idle connection, if any; close expired ones."""
        now = asyncio.get_running_loop().time()
        while self._idle and (self._idle[0].lost or now - self._idle[0].used > LONGEST_IDLE):
            self._idle.pop(0).abort()
        while self._idle:
            if not (found := self._idle.pop()).lost:
                return found
        return None

    async def _opened(self) -> _Connection:
        loop = asyncio.get_running_loop()
        async with asyncio.timeout(CONNECT_TIMEOUT):
            _, made = await loop.create_connection(
                _Connection, self._host, self._port, ssl=self._tls
            )
        return made


class _Connection(asyncio.Protocol):
    """`used`: the loop's time of the last request or response. Its `on_` methods are called by the
    parser."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._transport: asyncio.Transport | None = None
        self._parser = httptools.HttpResponseParser(self)
        self._waiting: asyncio.Future[HttpAnswer] | None = None
        self._clock: asyncio.TimerHandle | None = None  # kept between requests, as it is costly
        self.lost, self.used = False, self._loop.time()
        self.on_message_begin()

    def post(self, head: bytes, body: bytes, silence: float) -> asyncio.Future[HttpAnswer]:
        assert self._transport is not None
        waiting: asyncio.Future[HttpAnswer] = self._loop.create_future()
        self._waiting, self.used = waiting, self._loop.time()
        self._transport.write(b"%bcontent-length: %d\r\n\r\n%b" % (head, len(body), body))
        if self._clock is None:
            self._clock = self._loop.call_later(silence, self._look, silence)
        return waiting

    def abort(self) -> None:
        self.lost = True
        if self._clock is not None:
            self._clock.cancel()
        if self._transport is not None:
            self._transport.abort()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # uvloop's is not a subclass

    def connection_lost(self, exc: Exception | None) -> None:
        if exc is None and self._ends_at_close:
            self.on_message_complete()
        self._fail(exc or ConnectionResetError("the server closed the connection"))

    def data_received(self, data: bytes) -> None:
        self.used = self._loop.time()
        try:
            self._parser.feed_data(data)
        except (httptools.HttpParserError, httptools.HttpParserUpgrade) as error:
            self._fail(NotHttp(str(error)))

    def on_message_begin(self) -> None:
        self._kind, self._body = "", list[bytes]()
        self._sized = self._ends_at_close = False

    def on_header(self, name: bytes, value: bytes) -> None:
        name = name.lower()
        self._sized |= name in SIZED
        if name == b"content-type":
            self._kind = value.decode("latin-1").partition(";")[0].strip().lower()

    def on_headers_complete(self) -> None:
        self._ends_at_close = not self._sized

    def on_body(self, body: bytes) -> None:
        self._body.append(body)

    def on_message_complete(self) -> None:
        self._ends_at_close = False
        status = self._parser.get_status_code()
        if status < 200:  # another follows
            return
        waiting, self._waiting = self._waiting, None
        if waiting is None:  # nobody asked
            self.abort()
        elif not waiting.done():
            last = self.lost or not self._parser.should_keep_alive()
            waiting.set_result(HttpAnswer(status, self._kind, b"".join(self._body), last))

    def _look(self, silence: float) -> None:
        """Fail the request after `silence` seconds without a byte."""
        left = self.used + silence - self._loop.time()
        if self._waiting is None:
            self._clock = None
        elif left > 0:
            self._clock = self._loop.call_later(left, self._look, silence)
        else:
            self._fail(TimeoutError())

    def _fail(self, error: Exception) -> None:
        self.abort()
        if self._waiting is not None and not self._waiting.done():
            self._waiting.set_exception(error)
