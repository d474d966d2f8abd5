"""A few threads that read, never blocked by the writer."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from agentrl.errors import StoreError
from agentrl.store.database import Connection, ReadPool

T = TypeVar("T")


class ReaderThreads:
    """Owns the reading threads. Every read sees one snapshot of the store."""

    def __init__(self, read_pool: ReadPool) -> None:
        self._read_pool = read_pool
        self._pool: ThreadPoolExecutor | None = ThreadPoolExecutor(
            read_pool.threads, "store-reader"
        )

    async def read(self, query: Callable[[Connection], T]) -> T:
        if self._pool is None:
            raise StoreError(f"Store {self._read_pool.name} is closed.")
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._pool, self._read, query)

    def close(self) -> None:
        pool, self._pool = self._pool, None
        if pool is not None:
            pool.shutdown()
        self._read_pool.close()

    def _read(self, query: Callable[[Connection], T]) -> T:
        since = time.monotonic()
        while True:
            try:
                with self._read_pool.read_transaction() as conn:
                    return query(conn)
            except self._read_pool.errors as error:
                if not self._read_pool.can_retry(error, since):
                    raise self._read_pool.to_store_error(error) from error
