"""The interface between the verbs and a database: SQL statements, connections, transactions.

The verbs see a `Connection`; the writer drives one `Session`; `ReaderThreads` use a `ReadPool`.
SQL is in `sql/*.sql`, one file per noun; each statement follows a line `-- name: <name>`. It is
written once, in the SQL that SQLite and PostgreSQL share, with parameters `:name` or `?`. Where
they differ, or PostgreSQL needs a lock, `sql/postgres/<noun>.sql` overrides it by name.
"""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from functools import cache, cached_property
from pathlib import Path
from typing import Any, Protocol, TypeVar

from agentrl.errors import StoreError

T = TypeVar("T")
Parameters = Mapping[str, Any] | Sequence[Any]
SQL_FOLDER = Path(__file__).parent / "sql"
MARK = re.compile(r"^-- name: (\w+)$", re.MULTILINE)
NAMED = re.compile(r"(?<![:\w]):(\w+)")  # `:name`, but not the type in `::text`


class Statement(str):
    """SQL as SQLite reads it; `postgres` is the same for psycopg."""

    noun: str
    name: str

    @cached_property
    def postgres(self) -> str:
        sql = _read(f"postgres/{self.noun}").get(self.name, self)
        return NAMED.sub(r"%(\1)s", sql.replace("%", "%%")).replace("?", "%s")


def load_sql(noun: str) -> dict[str, Statement]:
    """The statements of `sql/<noun>.sql` by name."""
    found = {}
    for name, sql in _read(noun).items():
        statement = found[name] = Statement(sql)
        statement.noun, statement.name = noun, name
    return found


@cache
def _read(file: str) -> dict[str, str]:
    path = SQL_FOLDER / f"{file}.sql"
    if not path.exists():
        return {}
    _, *parts = MARK.split(path.read_text(encoding="utf-8"))
    return {name: sql.strip() for name, sql in zip(parts[::2], parts[1::2], strict=True)}


class Cursor(Protocol):
    """Rows are read by column name or number."""

    @property
    def rowcount(self) -> int: ...
    def fetchone(self) -> Any: ...
    def fetchall(self) -> list[Any]: ...
    def __iter__(self) -> Iterator[Any]: ...


class Connection(Protocol):
    """Statements come from `load_sql`."""

    def execute(self, sql: str, parameters: Parameters = ..., /) -> Cursor: ...
    def executemany(self, sql: str, rows: Iterable[Parameters], /) -> object: ...


class Session(Protocol):
    """The writing connection of a process, and its transactions. Used by one thread."""

    errors: tuple[type[Exception], ...]  # what the database raises

    @property
    def conn(self) -> Connection: ...

    def begin(self) -> float:
        """The time, unix seconds, by the one clock that all processes of the store share."""
        ...

    def commit(self, topics: int) -> None:
        """Returns when the transaction is durable. Other processes hear of the topics."""
        ...

    def rollback(self) -> None:
        """Undoes the open transaction, if there is one."""
        ...

    def can_continue(self, error: Exception) -> bool:
        """Whether the transaction goes on after the savepoint before the error is restored."""
        ...

    def can_retry(self, error: Exception, since: float) -> bool:
        """Whether the same transaction may succeed now, after waiting for what it takes. It was
        first tried at `since`, of the monotonic clock."""
        ...

    def to_store_error(self, error: Exception) -> Exception:
        """The error as a user reads it."""
        ...

    def close(self) -> None: ...


class ReadPool(Protocol):
    """Reading connections, for any number of threads."""

    name: str
    threads: int  # that may read at once
    errors: tuple[type[Exception], ...]

    def read_transaction(self) -> AbstractContextManager[Connection]:
        """What it reads is the store at one moment."""
        ...

    def can_retry(self, error: Exception, since: float) -> bool:
        """As that of `Session`, for reading anew."""
        ...

    def to_store_error(self, error: Exception) -> Exception: ...

    def close(self) -> None: ...


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
