"""Server connections with a fast path for calls that arrive complete in one read.

Most calls are small. A call that arrives complete, in the plain form that most clients send, is
passed to the store without the cost of an ASGI request; uvicorn handles all others (parts, chunks,
large bodies, other pages, malformed requests). Invariant: responses are sent in the order of their
requests; while a call is executed, later data is only buffered.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Mapping
from functools import lru_cache
from typing import Any

from agentrl.store.http.request_limits import HEAD, HEADERS, ConnectionLimits, LimitedProtocol
from agentrl.store.http.server import StoreApp

LINE = re.compile(rb"([!#$%&'*+.^_`|~0-9A-Za-z-]+):[ \t]*([^\x00-\x08\x0a-\x1f\x7f]*)")
UNUSUAL = frozenset({b"transfer-encoding", b"expect", b"upgrade", b"connection"})
PREFIX, VERSION, LENGTH = b"POST ", b" HTTP/1.1", b"content-length"


class WholeCallProtocol(LimitedProtocol):
    def __init__(self, app: StoreApp, guard: ConnectionLimits, *args: Any, **kwargs: Any) -> None:
        super().__init__(guard, *args, **kwargs)
        self._store_app = app
        self._call: asyncio.Task[None] | None = None
        self._later = bytearray()  # data received during a call
        self._last = False  # whether to close the connection after this call
        self._gone: asyncio.Future[None] | None = None

    def data_received(self, data: bytes) -> None:
        if self._call is not None:
            self._later += data
            if len(self._later) > HEAD:
                self.flow.pause_reading()
        elif self._between_requests() and (call := whole_call(data)):
            self._start(*call)
        else:
            super().data_received(data)

    def connection_lost(self, exc: Exception | None) -> None:
        if self._gone is not None and not self._gone.done():
            self._gone.set_result(None)
        super().connection_lost(exc)

    def shutdown(self) -> None:
        if self._call is None:
            super().shutdown()
        self._last = True

    def _between_requests(self) -> bool:
        idle = self.cycle is None or self.cycle.response_complete
        return self._whole and idle and not self.pipeline and not self.transport.is_closing()

    def _start(self, path: str, headers: Mapping[bytes, bytes], body: bytes) -> None:
        self._unset_keepalive_if_required()
        self._stop_clock()
        self._guard.busy(self)
        self._call = self.loop.create_task(self._answer(path, headers, body))
        self.tasks.add(self._call)
        self._call.add_done_callback(self.tasks.discard)

    async def _answer(self, path: str, headers: Mapping[bytes, bytes], body: bytes) -> None:
        try:
            answer = await self._store_app.answer(path, headers, body, self._disconnected)
            if answer is not None and not self.transport.is_closing():
                self.transport.write(answer.head() + answer.body)
                await self.flow.drain()
        except BaseException:  # the event loop logs it
            self.transport.close()
            raise
        self._call = None
        if self._last:
            self.transport.close()
        elif not self.transport.is_closing():
            self._go_on()

    def _go_on(self) -> None:
        self.timeout_keep_alive_task = self.loop.call_later(
            self.timeout_keep_alive, self.timeout_keep_alive_handler
        )
        self._look()
        if self._later:
            later, self._later = bytes(self._later), bytearray()
            self.flow.resume_reading()
            self.data_received(later)

    async def _disconnected(self) -> dict[str, Any]:
        """Wait for the disconnect, like ASGI's `receive` after the body."""
        self._gone = self._gone or self.loop.create_future()
        if not self.transport.is_closing():
            await asyncio.shield(self._gone)
        return {"type": "http.disconnect"}


def whole_call(data: bytes) -> tuple[str, Mapping[bytes, bytes], bytes] | None:
    """Parse path, headers and body if the data is exactly one call; None for anything else."""
    end = data.find(b"\r\n\r\n")
    head = parsed_head(data[:end]) if 0 < end <= HEAD else None
    if head is None:
        return None
    path, headers, body = *head, data[end + 4 :]
    return (path, headers, body) if headers.get(LENGTH) == b"%d" % len(body) else None


@lru_cache(256)  # a client sends the same heads repeatedly
def parsed_head(head: bytes) -> tuple[str, Mapping[bytes, bytes]] | None:
    """Parse path and headers of a call in the usual form; None for anything else."""
    request, *lines = head.split(b"\r\n")
    path = request[len(PREFIX) : -len(VERSION)].decode("latin-1")
    usual = request.startswith(PREFIX) and request.endswith(VERSION)
    if not usual or path not in StoreApp.CALLS or len(lines) > HEADERS:
        return None
    headers = dict[bytes, bytes]()
    for line in lines:
        if (found := LINE.fullmatch(line)) is None:
            return None
        headers[found[1].lower()] = found[2]
    usual = len(headers) == len(lines) and UNUSUAL.isdisjoint(headers)
    return (path, headers) if usual else None
