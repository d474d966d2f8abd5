"""Minimal HTTP connections to a store's server: a request is one write, its response mostly one
read.

Owns: the idle connections of one event loop. Invariant: a connection has one request at a time; it
is not reused after a cancelled request or a connection error. This parses the responses of
`agentrl store serve`; for others (of a proxy that sends chunks, for example) it raises `Unreadable`
and the request needs a full HTTP client.
"""

from __future__ import annotations

import asyncio
import re
from typing import NamedTuple, cast

CONNECT = 5.0  # seconds to establish a connection
IDLE = 60.0  # seconds for which an idle connection is kept, less than at the server
HEAD = 64 * 1024  # maximum bytes of a response's head
END = b"\r\n\r\n"
READ = 64 * 1024  # bytes per read
PLAIN = re.compile(  # the head of most responses of a store's server
    rb"HTTP/1\.1 ([2-5]\d\d) [^\r\n]*\r\n"
    rb"content-type: ([a-z/]+)\r\ncontent-length: (\d{1,18})\r\n\r\n"
)
STATUS = re.compile(rb"HTTP/1\.1 [2-5]\d\d[ \r]")
LENGTH = re.compile(rb"\r\ncontent-length: *(\d+)(?=\r\n)", re.IGNORECASE)
KIND = re.compile(rb"\r\ncontent-type: *([^;\r]*)", re.IGNORECASE)
CHUNKS = re.compile(rb"\r\ntransfer-encoding:", re.IGNORECASE)
CLOSE = re.compile(rb"\r\nconnection: *close", re.IGNORECASE)


class Unreadable(Exception):
    """The response uses features of HTTP that a store's server does not use."""


class HttpAnswer(NamedTuple):
    status: int
    kind: str  # content type, without its parameters
    body: bytes
    last: bool = False  # whether the server closes the connection after it


class Connections:
    """Connections to one server, for one event loop."""

    def __init__(self, host: str, port: int) -> None:
        self._host, self._port = host, port
        self._idle: list[_Connection] = []

    async def post(self, head: bytes, body: bytes, silence: float) -> HttpAnswer:
        """Send a request and return its response. Raises OSError (including TimeoutError) if there
        is no server, the connection is lost, or `silence` seconds pass without a byte."""
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
        while self._idle and (self._idle[0].lost or now - self._idle[0].used > IDLE):
            self._idle.pop(0).abort()
        while self._idle:
            if not (found := self._idle.pop()).lost:
                return found
        return None

    async def _opened(self) -> _Connection:
        loop = asyncio.get_running_loop()
        async with asyncio.timeout(CONNECT):
            _, made = await loop.create_connection(_Connection, self._host, self._port)
        return made


class _Connection(asyncio.BufferedProtocol):
    """`used`: the loop's time of the last request or response."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._transport: asyncio.Transport | None = None
        self._waiting: asyncio.Future[HttpAnswer] | None = None
        self._got, self._buffer = bytearray(), memoryview(bytearray(READ))
        self._clock: asyncio.TimerHandle | None = None  # kept between requests, as it is costly
        self.lost, self.used = False, self._loop.time()

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
        self._fail(exc or ConnectionResetError("the server closed the connection"))

    def get_buffer(self, sizehint: int) -> memoryview:
        return self._buffer

    def buffer_updated(self, nbytes: int) -> None:
        self._got += self._buffer[:nbytes]
        self.used = self._loop.time()
        try:
            answer = whole_answer(self._got)
        except Unreadable as error:
            self._fail(error)
            return
        if answer is not None:
            self._got = bytearray()
            waiting, self._waiting = self._waiting, None
            if waiting is not None and not waiting.done():
                waiting.set_result(answer)

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


def whole_answer(got: bytearray) -> HttpAnswer | None:
    """Parse a response; None if it is incomplete. Raises Unreadable unless it is exactly one plain
    response."""
    if plain := PLAIN.match(got):
        status, kind, size = plain.groups()
        if len(got) == plain.end() + int(size):
            return HttpAnswer(int(status), kind.decode(), bytes(memoryview(got)[plain.end() :]))
    end = got.find(END, 0, HEAD)
    if end < 0 and len(got) < HEAD:
        return None
    head = bytes(got[: end + 2])
    lengths = LENGTH.findall(head)
    if not STATUS.match(head) or len(lengths) != 1 or CHUNKS.search(head):
        raise Unreadable
    start, size = end + len(END), int(lengths[0])
    if len(got) <= start + size:
        if len(got) < start + size:
            return None
        kind = KIND.search(head)
        form = kind[1].decode("latin-1").strip().lower() if kind else ""
        body = bytes(memoryview(got)[start:])
        return HttpAnswer(int(head[9:12]), form, body, last=CLOSE.search(head) is not None)
    raise Unreadable
