"""Readers: a few threads with a read-only connection each, never blocked by the writer."""

from __future__ import annotations

import asyncio
import sqlite3
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from agentrl.errors import StoreError
from agentrl.store.connection import Location

THREADS = 2
T = TypeVar("T")


class Readers:
    """Owns the reading connections. Every read sees one snapshot of the store."""

    def __init__(self, location: Location) -> None:
        self._location = location
        self._local = threading.local()
        self._opened: list[sqlite3.Connection] = []
        self._pool: ThreadPoolExecutor | None = ThreadPoolExecutor(THREADS, "store-reader")

    async def read(self, query: Callable[[sqlite3.Connection], T]) -> T:
        if self._pool is None:
            raise StoreError(f"Store {self._location.path} is closed.")
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._pool, self._snapshot, query)

    def close(self) -> None:
        pool, self._pool = self._pool, None
        if pool is not None:
            pool.shutdown()
        for conn in self._opened:
            conn.close()

    def _snapshot(self, query: Callable[[sqlite3.Connection], T]) -> T:
        with self._location.explained():
            conn = self._connection()
            conn.execute("begin")
            try:
                return query(conn)
            finally:
                conn.execute("rollback")

    def _connection(self) -> sqlite3.Connection:
        conn: sqlite3.Connection | None = getattr(self._local, "conn", None)
        if conn is None:
            conn = self._local.conn = self._location.connect(readonly=True)
            self._opened.append(conn)
        return conn
