"""Readers: a few threads that read snapshots, never blocked by the writer."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from agentrl.errors import StoreError
from agentrl.store.database import Connection, Snapshots

T = TypeVar("T")


class Readers:
    """Owns the reading threads. Every read sees one snapshot of the store."""

    def __init__(self, snapshots: Snapshots) -> None:
        self._snapshots = snapshots
        self._pool: ThreadPoolExecutor | None = ThreadPoolExecutor(
            snapshots.threads, "store-reader"
        )

    async def read(self, query: Callable[[Connection], T]) -> T:
        if self._pool is None:
            raise StoreError(f"Store {self._snapshots.name} is closed.")
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._pool, self._read, query)

    def close(self) -> None:
        pool, self._pool = self._pool, None
        if pool is not None:
            pool.shutdown()
        self._snapshots.close()

    def _read(self, query: Callable[[Connection], T]) -> T:
        since = time.monotonic()
        while True:
            try:
                with self._snapshots.snapshot() as conn:
                    return query(conn)
            except self._snapshots.errors as error:
                if not self._snapshots.recover(error, since):
                    raise self._snapshots.explained(error) from error
