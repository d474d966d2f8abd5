"""Server-sent events that tell open pages to reload their data after changes of the store."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import suppress
from typing import Protocol

from agentrl.errors import StoreError

KEEPALIVE_INTERVAL = 15.0  # seconds after which a comment shows that the connection is alive
EVENT_PAUSE = 0.7  # seconds between two events of a stream, because drawing slows down training
REREAD_PAUSE = 2.0  # seconds before another read of an unreadable store


class Changing(Protocol):
    """A store, or all stores of a server."""

    async def cursor(self) -> int: ...
    async def wait(self, cursor: int, *, timeout: float | None = None) -> int: ...


class ChangeFeed:
    """The event streams of one server."""

    def __init__(self, store: Changing) -> None:
        self._store, self._ending = store, asyncio.Event()

    def end(self) -> None:
        """End every stream, so that the server can stop."""
        self._ending.set()

    async def stream(self, last: str) -> AsyncIterator[str]:
        """Events `change` with the store's cursor as id. `last`: the client's last id; '': now."""
        cursor = int(last) if last.isdecimal() else await self._store.cursor()
        yield f"retry: 2000\nid: {cursor}\nevent: hello\ndata: {cursor}\n\n"
        while not self._ending.is_set():
            try:
                newest = await self._changed(cursor)
            except StoreError as error:
                yield f"event: lost\ndata: {' '.join(str(error).split())}\n\n"
                await self._rest(REREAD_PAUSE)
                continue
            changed, cursor = newest > cursor, newest
            yield f"id: {cursor}\nevent: change\ndata: {cursor}\n\n" if changed else ": quiet\n\n"
            await self._rest(EVENT_PAUSE if changed else 0)

    async def _changed(self, cursor: int) -> int:
        """The newest cursor, after a change, after QUIET seconds, or at the end."""
        wait = asyncio.ensure_future(self._store.wait(cursor, timeout=KEEPALIVE_INTERVAL))
        end = asyncio.ensure_future(self._ending.wait())
        try:
            await asyncio.wait((wait, end), return_when=asyncio.FIRST_COMPLETED)
            return wait.result() if wait.done() else cursor
        finally:
            wait.cancel()
            end.cancel()

    async def _rest(self, seconds: float) -> None:
        with suppress(TimeoutError):
            await asyncio.wait_for(self._ending.wait(), seconds)
