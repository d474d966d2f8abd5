"""What the store needs of a database beyond SQL: the only things its backends differ in.

The verbs see a `Connection`; the writer drives one `Session`; reads happen in `ReadPool`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol

Parameters = Mapping[str, Any] | Sequence[Any]


class Cursor(Protocol):
    """Rows are read by column name or number."""

    @property
    def rowcount(self) -> int: ...
    def fetchone(self) -> Any: ...
    def fetchall(self) -> list[Any]: ...
    def __iter__(self) -> Iterator[Any]: ...


class Connection(Protocol):
    """Statements come from `queries.load`."""

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
