"""The interface between the verbs and a database, and the change feed.

The verbs use a `Connection`, the writer a `Session`, `ReaderThreads` a `ReadPool`. SQL is in the
`*.sql` files beside this one, one per noun; each statement follows a line `-- name: <name>`.
Statements are in SQLite's dialect with parameters `:name` or `?`, and translated for PostgreSQL
(`FORMS`). If that is not enough, or PostgreSQL needs a lock, `postgres/<noun>.sql` has a statement
with the same name.

In the feed inside one process, tasks wait for a topic, and any thread wakes them. It owns one
counter per topic, and the futures of waiting tasks. Invariant: a notification between `ticket` and
`changed` is not lost. The writer notifies after its commit, the listener after commits of other
processes.
"""

from __future__ import annotations

import asyncio
import re
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from functools import cache, cached_property, lru_cache
from pathlib import Path
from typing import Any, Protocol, TypeVar

from agentrl.core.errors import StoreError

NO_LIMIT = 2**62  # above any number of rows and any cursor
T = TypeVar("T")
Parameters = Mapping[str, Any] | Sequence[Any]
SQL_FOLDER = Path(__file__).parent
MARK = re.compile(r"^-- name: (\w+)$", re.MULTILINE)
LISTED = r"= any (array(select json_array_elements_text(\1::json)))"
NO_LIMIT = 2**62
FORMS = {  # pattern in SQLite's dialect -> replacement for PostgreSQL
    r"in \(select value from json_each\((:\w+|\?)\)\)": LISTED,
    r"length\(cast\((\w+) as blob\)\)": r"octet_length(\1)",
    r"\binstr\(": "strpos(",
    r"\browid\b": "seq",
    r"(?<=\s)\+(?=\w)": "",  # a unary plus keeps SQLite from using an index
}
PARAMETER = re.compile(r"%\((\w+)\)s|%s|%%")
NAMED = re.compile(r"(?<![:\w]):(\w+)")  # `:name`, but not the type in `::text`


class Statement(str):
    """SQL for SQLite; `postgres` is its translation for psycopg."""

    noun = ""
    name = ""

    @cached_property
    def postgres(self) -> str:
        sql = _read(f"postgres/{self.noun}").get(self.name)
        if sql is None:
            sql = str(self)
            for form, same in FORMS.items():
                sql = re.sub(form, same, sql)
        return NAMED.sub(r"%(\1)s", sql.replace("%", "%%")).replace("?", "%s")

    @cached_property
    def numbered(self) -> tuple[str, tuple[str, ...]]:
        """The statement for PostgreSQL's server, with $1, $2, and the names of its parameters."""
        return numbered(self.postgres)


@lru_cache(256)
def numbered(query: str) -> tuple[str, tuple[str, ...]]:
    """Convert psycopg's placeholders, either all named or all positional, to $1, $2, ...; return
    the query and the names of its parameters."""
    names: list[str] = []

    def number(mark: re.Match[str]) -> str:
        if mark[0] == "%%":
            return "%"
        if mark[1] is None or mark[1] not in names:
            names.append(mark[1] or "")
            return f"${len(names)}"
        return f"${names.index(mark[1]) + 1}"

    return PARAMETER.sub(number, query), tuple(names)


def load_sql(noun: str) -> dict[str, Statement]:
    """Load the statements of `<noun>.sql` by name."""
    statements = {}
    for name, sql in _read(noun).items():
        statement = statements[name] = Statement(sql)
        statement.noun, statement.name = noun, name
    return statements


def joined(*parts: Statement) -> Statement:
    """Concatenate statements, with their translations for PostgreSQL."""
    statement = Statement("\n".join(parts))
    statement.postgres = "\n".join(part.postgres for part in parts)
    return statement


@cache
def _read(file: str) -> dict[str, str]:
    path = SQL_FOLDER / f"{file}.sql"
    if not path.exists():
        return {}
    _, *parts = MARK.split(path.read_text(encoding="utf-8"))
    return {name: sql.strip() for name, sql in zip(parts[::2], parts[1::2], strict=True)}


def migrations(folder: str) -> dict[str, Path]:
    """Return the scripts of `<folder>` by name, in order of application."""
    return {path.stem: path for path in sorted((SQL_FOLDER / folder).glob("*.sql"))}


def missing_migrations(scripts: Mapping[str, Path], applied: set[str], store: str) -> list[str]:
    """List the scripts that a store lacks. Raises StoreError if it has unknown ones."""
    if unknown := sorted(applied - scripts.keys()):
        raise StoreError(
            f"Store {store} was written by a newer agentrl (schema {unknown[-1]}): upgrade agentrl "
            "or choose another store."
        )
    return [name for name in scripts if name not in applied]


def check_readable(missing: Sequence[str], store: str) -> None:
    """Raise StoreError if a store lacks migrations."""
    if missing:
        raise StoreError(
            f"Store {store} was written by an older agentrl (it lacks {missing[0]}) and is open "
            "for reading only: migrate it, or a copy of it, with `agentrl store stats`."
        )


class Cursor(Protocol):
    """Result of a statement; rows are read by column name."""

    @property
    def rowcount(self) -> int: ...
    def fetchone(self) -> Any: ...
    def fetchall(self) -> list[Any]: ...
    def __iter__(self) -> Iterator[Any]: ...


class Connection(Protocol):
    """Executes statements of `load_sql`."""

    def execute(self, sql: str, parameters: Parameters = ..., /) -> Cursor: ...


class WritingConnection(Connection, Protocol):
    shared: bool  # whether other processes write concurrently, so that rows must be locked

    def ask(self, sql: str, parameters: Parameters = ..., /) -> Cursor:
        """Like `execute`, for a statement with few rows: many may be pending at once, and reading
        the first waits for all of them."""

    def executemany(self, sql: str, rows: Iterable[Parameters], /) -> object: ...


class Connected(Protocol):
    """Base of `Session` and `ReadPool`."""

    errors: tuple[type[Exception], ...]  # errors of the database driver

    def can_retry(self, error: Exception, since: float) -> bool:
        """Whether to retry the same transaction now; waits before if needed. `since`: time of the
        first try by the monotonic clock."""

    def to_store_error(self, error: Exception) -> Exception:
        """Convert an error to one for users."""

    def close(self) -> None: ...


class Session(Connected, Protocol):
    """The writing connection of a process and its transactions, for one thread."""

    @property
    def conn(self) -> WritingConnection: ...

    def begin(self) -> float | Callable[[], float]:
        """Begin a transaction; return its constant time, in unix seconds of the clock that all
        processes of the store share, or a function that asks the database for it."""

    def flush(self) -> None:
        """Wait until all statements are executed. Raises the first error of those whose results
        were not read."""

    def commit(self, topics: int) -> None:
        """Commit durably, and notify other processes of the topics."""

    def notify_others(self, topics: int) -> None:
        """Notify other processes of earlier commits."""

    def rollback(self) -> None:
        """Roll back the open transaction, if there is one."""

    def can_continue(self, error: Exception) -> bool:
        """Whether the transaction remains usable after a rollback to the last savepoint."""


class ReadPool(Connected, Protocol):
    """Reading connections, for any number of threads."""

    name: str
    threads: int  # concurrent readers

    def read_transaction(self) -> AbstractContextManager[Connection]:
        """Open a transaction in which all reads see the same snapshot."""


class ReaderThreads:
    """Owns the reading threads. Every query sees one snapshot of the store."""

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


QUEUE = 1  # a rollout can be claimed
GROUPS = 2  # a group settled, or was released
ANY = 4  # anything was written
TOPICS = (QUEUE, GROUPS, ANY)
ALL = QUEUE | GROUPS | ANY
Answers = Iterable[tuple[asyncio.Future[Any], Any]]


class Feed:
    """Wake-ups by topic. Topics are bits, so one byte holds all topics of a commit."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._rings = dict.fromkeys(TOPICS, 0)
        self._waiting: dict[int, set[asyncio.Future[None]]] = {topic: set() for topic in TOPICS}

    def ticket(self, topic: int) -> int:
        """Return a ticket; take it before a query: `changed` returns at once if a notification has
        arrived since."""
        return self._rings[topic]

    async def changed(self, topic: int, ticket: int, timeout: float | None) -> None:
        """Wait up to `timeout` seconds for a notification of the topic later than the ticket."""
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        with self._lock:
            if self._rings[topic] != ticket:
                return
            self._waiting[topic].add(future)
        try:
            await asyncio.wait((future,), timeout=timeout)
        finally:
            future.cancel()
            with self._lock:
                self._waiting[topic].discard(future)

    def notify(self, topics: int) -> None:
        woken: list[asyncio.Future[None]] = []
        with self._lock:
            for topic in TOPICS:
                if topics & topic:
                    self._rings[topic] += 1
                    woken += self._waiting[topic]
                    self._waiting[topic].clear()
        resolve((future, None) for future in woken)


def resolve(answers: Answers) -> None:
    """Resolve futures from any thread, each with a result or an exception. Wakes each event loop
    only once, however many of its futures are resolved."""
    by_loop: dict[asyncio.AbstractEventLoop, list[Any]] = defaultdict(list)
    for future, answer in answers:
        by_loop[future.get_loop()].append((future, answer))
    for loop, mine in by_loop.items():
        try:
            loop.call_soon_threadsafe(_settle, mine)
        except RuntimeError:  # a closed loop has no waiters
            if not loop.is_closed():
                raise


def _settle(answers: Answers) -> None:
    """Resolve futures of the running event loop."""
    for future, answer in answers:
        if future.done():  # its waiter was cancelled
            continue
        if isinstance(answer, Exception):
            future.set_exception(answer)
        else:
            future.set_result(answer)
