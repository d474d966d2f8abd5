"""Sends statements without waiting for each other's results (libpq's pipeline mode).

Owns: the writing connection while a transaction is open. Invariant: `execute` sends a statement;
reading its result waits for it and all earlier ones, so only reads cost a round trip. A statement's
error is raised by the next wait, and statements after it are not executed. Each statement is
prepared once.

Uses `psycopg.pq` directly: a statement costs 2 µs of CPU, but 30 µs as a psycopg cursor, most of
the cost of a small verb. psycopg converts the values.
"""

from __future__ import annotations

import itertools
import re
import select
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import psycopg
from psycopg.adapt import PyFormat, Transformer
from psycopg.errors import error_from_result
from psycopg.pq import ConnStatus, ExecStatus
from psycopg.pq.abc import PGresult
from psycopg.rows import DictRow

from agentrl.store.sql.database import Parameters, Statement, numbered

DONE = (ExecStatus.COMMAND_OK, ExecStatus.TUPLES_OK)
ROWS_PER_INSERT = (16, 4, 1)  # rows per insert statement
NUMBERS = itertools.count()
PLANS = "; ".join(
    (
        "set plan_cache_mode = force_generic_plan",  # planning takes as long as an insert
        "set enable_seqscan = off",  # cached plans may date from when the tables were empty
        "set jit = off",
    )
)
FORMATS = [PyFormat.AUTO] * 1024  # more than the parameters of any statement
VALUES, PLACE = "values (", re.compile(r"\$(\d+)")
MOST_KEYS = 4096  # keys of prepared queries, of which many may refer to the same one
Key = tuple[str, tuple[int, ...]]  # (query, type oids of its values)
MOST_PENDING = 500  # maximum of pending statements, as their results take memory


@dataclass(slots=True, eq=False)
class Prepared:
    """A prepared query, for values of these types; 0: any type."""

    name: bytes
    query: str
    types: tuple[int, ...]
    columns: list[str] = field(default_factory=list)  # of its results, set by the first

    def takes(self, types: tuple[int, ...]) -> bool:
        """Whether the types match; a null has type 0."""
        return all(given in (0, mine) for given, mine in zip(types, self.types, strict=True))


class StatementResult:
    """The pending or received result of a statement, a `database.Cursor`."""

    __slots__ = ("_next", "_pipeline", "_rows", "prepared", "prepares", "raw")

    def __init__(self, pipeline: Pipeline, prepared: Prepared, *, prepares: bool = False) -> None:
        self._pipeline, self.prepared, self.prepares = pipeline, prepared, prepares
        self.raw: PGresult | None = None
        self._rows: list[DictRow] | None = None
        self._next = 0

    @property
    def rowcount(self) -> int:
        return self._read().command_tuples or 0

    @property
    def rows(self) -> list[DictRow]:
        if self._rows is None:
            self._rows = self._pipeline.rows(self._read(), self.prepared)
        return self._rows

    def fetchone(self) -> DictRow | None:
        rows = self.rows
        self._next += 1
        return rows[self._next - 1] if self._next <= len(rows) else None

    def fetchall(self) -> list[DictRow]:
        found, self._next = self.rows[self._next :], len(self.rows)
        return found

    def __iter__(self) -> Iterator[DictRow]:
        return iter(self.fetchall())

    def _read(self) -> PGresult:
        if self.raw is None:
            self._pipeline.sync()
        if self.raw is None:
            raise psycopg.OperationalError("the connection is lost")
        return self.raw


class Pipeline:
    """The writer's `database.Connection`, unusable after a `psycopg.OperationalError`."""

    shared = True

    def __init__(
        self, raw: psycopg.Connection[DictRow], before_wait: Callable[[], None] = lambda: None
    ) -> None:
        """`before_wait` may send further statements before each wait."""
        self.raw, self._before_wait = raw, before_wait
        self._server = raw.pgconn
        self._values = Transformer.from_context(raw)
        self._prepared: dict[Key, Prepared] = {}
        self._by_query: dict[str, list[Prepared]] = {}
        self._sent: deque[StatementResult] = deque()
        self._ready = select.poll()
        raw.execute(PLANS)
        self._server.enter_pipeline_mode()
        self._server.nonblocking = 1

    def execute(self, sql: str, parameters: Parameters = (), /) -> StatementResult:
        query, names = sql.numbered if isinstance(sql, Statement) else numbered(sql)
        if isinstance(parameters, dict):
            parameters = [parameters[name] for name in names]
        elif not isinstance(parameters, list | tuple):
            raise TypeError("parameters are a dict, a list or a tuple")
        if len(self._sent) >= MOST_PENDING:
            self.sync()
        return self.send(query, parameters)

    ask = execute

    def send(self, query: str, parameters: Sequence[Any] = ()) -> StatementResult:
        """Send a query with placeholders $1, $2, ..., however many statements are pending."""
        values = self._values.dump_sequence(parameters, FORMATS[: len(parameters)])
        key = query, self._values.types or ()
        prepared = self._prepared.get(key) or self._prepare(key)
        self._server.send_query_prepared(prepared.name, values, self._values.formats)
        self._sent.append(result := StatementResult(self, prepared))
        return result

    def executemany(self, sql: str, rows: Iterable[Parameters], /) -> None:
        several, done = list(rows), 0
        query, names = sql.numbered if isinstance(sql, Statement) else numbered(sql)
        while left := len(several) - done:
            n = next(n for n in ROWS_PER_INSERT if n <= left)
            part, done = several[done : done + n], done + n
            together = of_several(query, n) if all(names) else None
            if together is None:
                for row in part:
                    self.execute(sql, row)
            else:
                values = [row[name] for row in part if isinstance(row, dict) for name in names]
                self.send(together, values)
            if len(self._sent) >= MOST_PENDING:
                self.sync()

    def sync(self) -> None:
        """Wait for all sent statements. Raises the first of their errors."""
        if not self._sent:
            return
        self._before_wait()
        sent, self._sent = self._sent, deque()
        failed: Exception | None = None
        try:
            self._server.pipeline_sync()
            while (raw := self._received()).status != ExecStatus.PIPELINE_SYNC:
                result = sent.popleft()
                if raw.status in DONE:
                    result.raw = raw
                    continue
                if result.prepares:
                    self._forget(result.prepared)
                if raw.status == ExecStatus.FATAL_ERROR and failed is None:
                    failed = error_from_result(raw)
        except psycopg.OperationalError as lost:
            raise (failed or lost) from lost
        if failed is not None:
            raise failed

    def rows(self, raw: PGresult, prepared: Prepared) -> list[DictRow]:
        if not (raw.ntuples and raw.nfields):
            return []
        columns = prepared.columns
        if not columns:
            columns += [(raw.fname(i) or b"").decode() for i in range(raw.nfields)]
        self._values.set_pgresult(raw)
        return self._values.load_rows(0, raw.ntuples, lambda row: dict(zip(columns, row)))  # noqa: B905

    # -- parts -------------------------------------------------------------------------------------

    def _prepare(self, key: Key) -> Prepared:
        """Prepare a query, or reuse one with matching types: nulls do not cause many variants."""
        if len(self._prepared) > MOST_KEYS:
            self._prepared.clear()
        query, types = key
        several = self._by_query.setdefault(query, [])
        for prepared in several:
            if prepared.takes(types):
                self._prepared[key] = prepared
                return prepared
        if several:
            types = tuple(new or known for new, known in zip(types, several[-1].types, strict=True))
        prepared = self._prepared[key] = Prepared(b"agentrl_%d" % next(NUMBERS), query, types)
        several.append(prepared)
        self._server.send_prepare(prepared.name, query.encode(), types)
        self._sent.append(StatementResult(self, prepared, prepares=True))
        return prepared

    def _forget(self, prepared: Prepared) -> None:
        self._by_query[prepared.query].remove(prepared)
        for key in [key for key, found in self._prepared.items() if found is prepared]:
            del self._prepared[key]

    def _received(self) -> PGresult:
        while True:
            while self._server.is_busy():
                self._wait()
            if (raw := self._server.get_result()) is not None:
                return raw
            if self._server.status != ConnStatus.OK:
                raise psycopg.OperationalError("the connection is lost")

    def _wait(self) -> None:
        more = select.POLLOUT if self._server.flush() else 0
        self._ready.register(self._server.socket, select.POLLIN | more)
        ((_, found),) = self._ready.poll()
        if found != select.POLLOUT:
            self._server.consume_input()


@lru_cache(256)
def of_several(query: str, n: int) -> str | None:
    """Convert a query that inserts a row, with parameters $1, $2, ..., to one that inserts n rows;
    None for any other query and for n = 1."""
    start = query.find(VALUES)
    if n == 1 or start < 0 or "do update" in query:
        return None
    start += len(VALUES) - 1
    depths = itertools.accumulate((c == "(") - (c == ")") for c in query[start:])
    end = start + next(i for i, depth in enumerate(depths) if depth == 0) + 1
    row, width = query[start:end], len(set(PLACE.findall(query)))

    def numbered_from(first: int) -> str:
        return PLACE.sub(lambda found: f"${int(found[1]) + first}", row)

    several = ", ".join(numbered_from(width * i) for i in range(n))
    return f"{query[:start]}{several}{query[end:]}"
