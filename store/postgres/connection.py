"""PostgreSQL connections: address and options, pipelined statements, transactions, and errors.

The password is never printed or passed on: `url` omits it, and only the driver gets it.

Statements are sent without waiting for each other's results (libpq's pipeline mode). The pipeline
owns the writing connection while a transaction is open. Invariant: `execute` sends a statement;
reading its result waits for it and all earlier ones, so only reads cost a round trip. A statement's
error is raised by the next wait, and statements after it are not executed. Each statement is
prepared once. `psycopg.pq` is used directly: a statement costs 2 µs of CPU, but 30 µs as a psycopg
cursor, most of the cost of a small verb. psycopg converts the values.

The writer has a session, readers have separate connections. Invariant: a transaction is committed
only once. If its connection breaks during the commit, its state is unknown; the next connection
asks the server (`pg_xact_status`) before a retry. After a deadlock or a lost connection the
transaction is retried, for up to `PATIENCE` seconds.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import re
import select
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import psycopg
from psycopg import conninfo
from psycopg.adapt import PyFormat, Transformer
from psycopg.errors import error_from_result
from psycopg.pq import ConnStatus, ExecStatus, TransactionStatus
from psycopg.pq.abc import PGresult
from psycopg.rows import DictRow, dict_row
from psycopg.types.numeric import Int8Dumper
from psycopg_pool import ConnectionPool

from agentrl.core.errors import Invalid, StoreError, Unavailable
from agentrl.store.sql.database import Parameters, Statement, numbered
from agentrl.store.urls import split_password

DONE = (ExecStatus.COMMAND_OK, ExecStatus.TUPLES_OK)
ROWS_PER_INSERT = (16, 4, 1)  # rows per insert statement
NUMBERS = itertools.count()
PLANS = "; ".join(
    (
        "set plan_cache_mode = force_generic_plan",  # planning takes as long as an insert
        "set enable_seqscan = off",  # cached plans may date from the time of empty tables
        "set jit = off",
    )
)
FORMATS = [PyFormat.AUTO] * 1024  # more than the parameters of any statement
VALUES, PLACE = "values (", re.compile(r"\$(\d+)")
MAX_KEYS = 4096  # keys of prepared queries; many may refer to the same query
Key = tuple[str, tuple[int, ...]]  # (query, type oids of its values)
MAX_PENDING = 500  # maximum of pending statements, as their results take memory


@dataclass(slots=True, eq=False)
class Prepared:
    """A prepared query for values of these types; 0: any type."""

    name: bytes
    query: str
    types: tuple[int, ...]
    # Columns of the results, set by the first result.
    columns: list[str] = field(default_factory=list)

    def takes(self, types: tuple[int, ...]) -> bool:
        """Whether the types match; a null has type 0."""
        return all(
            requested in (0, prepared)
            for requested, prepared in zip(types, self.types, strict=True)
        )


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
        remaining, self._next = self.rows[self._next :], len(self.rows)
        return remaining

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
        if len(self._sent) >= MAX_PENDING:
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
        all_rows, sent = list(rows), 0
        query, names = sql.numbered if isinstance(sql, Statement) else numbered(sql)
        while remaining := len(all_rows) - sent:
            n = next(n for n in ROWS_PER_INSERT if n <= remaining)
            chunk, sent = all_rows[sent : sent + n], sent + n
            together = of_several(query, n) if all(names) else None
            if together is None:
                for row in chunk:
                    self.execute(sql, row)
            else:
                values = [row[name] for row in chunk if isinstance(row, dict) for name in names]
                self.send(together, values)
            if len(self._sent) >= MAX_PENDING:
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
        if len(self._prepared) > MAX_KEYS:
            self._prepared.clear()
        query, types = key
        variants = self._by_query.setdefault(query, [])
        for prepared in variants:
            if prepared.takes(types):
                self._prepared[key] = prepared
                return prepared
        if variants:
            types = tuple(
                new or previous for new, previous in zip(types, variants[-1].types, strict=True)
            )
        prepared = self._prepared[key] = Prepared(b"agentrl_%d" % next(NUMBERS), query, types)
        variants.append(prepared)
        self._server.send_prepare(prepared.name, query.encode(), types)
        self._sent.append(StatementResult(self, prepared, prepares=True))
        return prepared

    def _forget(self, prepared: Prepared) -> None:
        self._by_query[prepared.query].remove(prepared)
        for key in [key for key, entry in self._prepared.items() if entry is prepared]:
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
        ((_, events),) = self._ready.poll()
        if events != select.POLLOUT:
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

    values = ", ".join(numbered_from(width * i) for i in range(n))
    return f"{query[:start]}{values}{query[end:]}"


PATIENCE = 60.0  # seconds to wait for an unreachable server before callers get an error
CHANNEL = "agentrl"
TIME = """select extract(epoch from clock_timestamp())::float8 as now,
    set_config('synchronous_commit', 'off', true)"""  # until the end of the transaction
NOTIFY = "select pg_notify(%s, %s)"
ID = "select pg_current_xact_id_if_assigned()::text as id"
DURABLE = "select pg_logical_emit_message(true, 'agentrl', '')"
AGAIN = (
    psycopg.errors.DeadlockDetected,
    psycopg.errors.SerializationFailure,
    psycopg.errors.LockNotAvailable,
)

logging.getLogger("psycopg.pool").setLevel(logging.ERROR)  # the pool warns of each reconnect


class PostgresSession:
    """The writing connection of a process: see `database.Session`."""

    errors: tuple[type[Exception], ...] = (psycopg.Error,)

    def __init__(self, server: PostgresServer, clock: Callable[[], float] | None = None) -> None:
        self._server, self._clock = server, clock
        self._raw = server.connect()
        self.conn = Pipeline(self._raw, self._ask_id)
        self._open = False
        self._id_query: StatementResult | None = None  # query for the open transaction's id
        self._away: psycopg.OperationalError | None = None  # error of the last try to connect

    @property
    def pid(self) -> int:
        """Pid of the server process, which identifies this process's own notifications."""
        return self._raw.info.backend_pid

    def begin(self) -> float | Callable[[], float]:
        self._open, self._id_query = True, None
        self.conn.execute("begin")
        now = self.conn.execute(TIME)
        if self._clock is not None:
            return self._clock()
        return lambda: float(_single(now)["now"])

    def flush(self) -> None:
        self.conn.sync()

    def commit(self, topics: int) -> None:
        """Commit without waiting for the disk: other transactions see this one, and get its locks,
        before it is durable. Then wait for the disk, together with the callers of all others.
        Transactions that depend on it are later in the log, so they do not survive a power cut
        without it.

        A transaction that has not waited for any statement is sent together with its commit, and
        has no id: if the connection breaks, its verbs are repeated. That is safe because they have
        not read anything."""
        if topics:
            self.conn.execute(NOTIFY, (CHANNEL, str(topics)))
        blind = self._id_query is None
        if not blind and self._id is None:
            self.conn.sync()
        id, self._open = self._id, False
        try:
            self.conn.execute("commit")
            if blind or id is not None:
                self.conn.execute(DURABLE)
            self.conn.sync()
        except psycopg.OperationalError:
            if id is None or not self._took_place(id):
                raise

    def notify_others(self, topics: int) -> None:
        self.conn.execute(NOTIFY, (CHANNEL, str(topics)))
        self.conn.sync()

    def rollback(self) -> None:
        self._open = False
        with contextlib.suppress(psycopg.Error):  # errors of abandoned statements
            self.conn.sync()
        with contextlib.suppress(psycopg.OperationalError):  # a lost connection rolls back
            if self._raw.info.transaction_status is not TransactionStatus.IDLE:
                self.conn.execute("rollback")
                self.conn.sync()

    def can_continue(self, error: Exception) -> bool:
        return not self._raw.broken and not isinstance(error, AGAIN)

    def can_retry(self, error: Exception, since: float) -> bool:
        if self._raw.broken or self._raw.closed:
            return self._reconnect(since)
        return isinstance(error, AGAIN) and time.monotonic() - since < PATIENCE

    def to_store_error(self, error: Exception) -> Exception:
        lost = isinstance(error, psycopg.OperationalError) and self._raw.closed
        return self._server.to_store_error(self._away if lost and self._away else error)

    def close(self) -> None:
        self._raw.close()

    @property
    def _id(self) -> str | None:
        """Id of the open transaction; None if unknown or not received yet."""
        received = self._id_query is not None and self._id_query.raw is not None
        return _single(self._id_query)["id"] if self._id_query and received else None

    def _ask_id(self) -> None:
        """Query the id with every wait until it is known: a transaction gets one with its first
        lock or write."""
        if self._open and self._id is None:
            self._id_query = self.conn.send(ID)

    def _reconnect(self, since: float) -> bool:
        self._raw.close()
        while time.monotonic() - since < PATIENCE:
            try:
                self._raw = self._server.connect()
            except psycopg.OperationalError as error:
                self._away = error
                time.sleep(RETRY_PAUSE)
            else:
                self.conn = Pipeline(self._raw, self._ask_id)
                return True
        return False

    def _took_place(self, transaction: str) -> bool:
        """Whether a transaction whose commit raised an error was committed nevertheless."""
        since = time.monotonic()
        while self._raw.closed and self._reconnect(since):
            with contextlib.suppress(psycopg.OperationalError):
                while (status := self._status(transaction)) == "in progress":
                    time.sleep(RETRY_PAUSE)
                self.conn.execute(DURABLE)
                self.conn.sync()
                return status == "committed"
        return False

    def _status(self, transaction: str) -> str | None:
        query = "select pg_xact_status(%s::xid8) as status"
        try:
            row = _single(self.conn.execute(query, (transaction,)))
        except psycopg.DataError:  # an id that this restored or promoted server never assigned
            return None
        status: str | None = row["status"]
        return status


def _single(result: StatementResult) -> DictRow:
    (row,) = result.rows
    return row


class PostgresReadPool:
    """A pool of connections for reading: see `database.ReadPool`."""

    threads = 4
    errors: tuple[type[Exception], ...] = (psycopg.Error, UnicodeError)

    def __init__(self, server: PostgresServer) -> None:
        self.name = server.url
        self._server = server
        self._pool: ConnectionPool[psycopg.Connection[DictRow]] = ConnectionPool(
            server.url,
            connection_class=psycopg.Connection[DictRow],
            kwargs={**server.options, "autocommit": True, "row_factory": dict_row},
            configure=configure,
            min_size=1,
            max_size=self.threads,
            timeout=PATIENCE,
            open=True,
        )

    @contextlib.contextmanager
    def read_transaction(self) -> Iterator[PostgresConnection]:
        with self._pool.connection() as raw:
            raw.execute("begin isolation level repeatable read read only")
            try:
                yield PostgresConnection(raw)
            finally:
                if not raw.broken:
                    raw.execute("rollback")

    def can_retry(self, error: Exception, since: float) -> bool:
        code = getattr(error, "sqlstate", None)
        lost = isinstance(error, psycopg.OperationalError) and (
            code is None or code.startswith(("08", "57P"))  # an error of the connection
        )
        if not lost or time.monotonic() - since > PATIENCE:
            return False
        time.sleep(RETRY_PAUSE)  # the pool opens new connections meanwhile
        return True

    def to_store_error(self, error: Exception) -> Exception:
        return self._server.to_store_error(error)

    def close(self) -> None:
        self._pool.close()


log = logging.getLogger("agentrl.store")
STARTING_PATIENCE = 60.0  # seconds to wait for a server that says that it is starting or stopping
# Seconds to wait for a server that refuses connections: it may be restarting.
REFUSED_PATIENCE = 3.0
RETRY_PAUSE = 0.2  # seconds between two tries
CONNECT_TIMEOUT = 10  # seconds to establish a connection
POOLER_CHECKS = 10  # number of tests for a pooler that switches server processes between statements
WHO = "select pg_backend_pid() as pid, pg_postmaster_start_time() as since"
# Settings of a role, a database or the server that a store must override: time limits that would
# end an enqueue or an idle writer, and isolation levels that make updates fail. Options in the URL
# keep their values.
SETTINGS = """select set_config(name, case name when 'default_transaction_isolation'
    then 'read committed' else '0' end, false) from pg_settings where source <> 'client'
    and name in ('statement_timeout', 'lock_timeout', 'transaction_timeout',
    'idle_in_transaction_session_timeout', 'idle_session_timeout', 'default_transaction_isolation')
"""
ADVICE = (
    ("password authentication failed", "check user and password"),
    ("no password supplied", "set PGPASSWORD, or put the password into the URL or ~/.pgpass"),
    ("database .* does not exist", "create it with createdb, or check the name"),
    ("role .* does not exist", "check the user's name"),
    ("permission denied", "let this user create tables there, or choose another database"),
    ("no schema has been selected", "create the schema that the URL's search_path names"),
    ("too many clients|remaining connection slots", "raise max_connections of the server"),
    (
        "(statement|lock|session|transaction) timeout",
        "remove the limit of time from the options of the URL or PGOPTIONS, or raise it",
    ),
    ("query_wait_timeout", "its pooler has too few connections: raise its pool_size"),
    ("refused|No such file|could not translate|resolve|timeout|timed out", "is it running there?"),
)


class PostgresConnection:
    """A psycopg connection that executes statements of `load_sql`."""

    def __init__(self, raw: psycopg.Connection[DictRow]) -> None:
        self.raw = raw

    def execute(self, sql: str, parameters: Parameters | None = None, /) -> psycopg.Cursor[DictRow]:
        if isinstance(sql, Statement):
            return self.raw.execute(sql.postgres.encode(), parameters or ())
        return self.raw.execute(sql.encode(), parameters)


@dataclass(frozen=True, slots=True)
class PostgresServer:
    """A database by its URL, with libpq's options; `url` has no password."""

    url: str
    password: str | None = field(default=None, repr=False)
    readonly: bool = False  # no connection may write

    @classmethod
    def parse(cls, url: str, *, readonly: bool = False) -> PostgresServer:
        public, password = split_password(url)
        try:
            conninfo.conninfo_to_dict(public)
        except psycopg.ProgrammingError as error:
            raise Invalid(
                f"Store URL {public!r} is not understood ({str(error).strip()}): use "
                "postgresql://user@host/database."
            ) from error
        return cls(public, password, readonly)

    @property
    def options(self) -> dict[str, Any]:
        """Defaults of options that the URL does not set: detect a lost server in half a minute."""
        in_url = conninfo.conninfo_to_dict(self.url)
        defaults = {
            "connect_timeout": CONNECT_TIMEOUT,
            "application_name": "agentrl",
            "keepalives_idle": 10,
            "keepalives_interval": 5,
            "keepalives_count": 3,
        }
        secret = {} if self.password is None else {"password": self.password}
        return {name: defaults[name] for name in defaults if name not in in_url} | secret

    def connect(self) -> psycopg.Connection[DictRow]:
        """Open a connection in autocommit mode: transactions begin explicitly."""
        conn = self._connect()
        configure(conn)
        if self.readonly:
            conn.execute("set default_transaction_read_only = on")
        return conn

    def _connect(self) -> psycopg.Connection[DictRow]:
        return psycopg.connect(self.url, autocommit=True, row_factory=dict_row, **self.options)

    def check_sessions(self) -> None:
        """Raise StoreError if two connections share a server process, as behind a pooler that lends
        one for a transaction only: prepared statements and settings would reach another client, and
        notifications would be lost. The check changes no setting, because other clients would get
        it too."""
        with closing(self._connect()) as first_conn, closing(self._connect()) as second_conn:
            first_seen, pids = None, (first_conn.info.backend_pid, second_conn.info.backend_pid)
            for _ in range(POOLER_CHECKS):
                mine, others = (
                    _one(conn.execute(WHO, prepare=False)) for conn in (first_conn, second_conn)
                )
                if mine == others or mine != (first_seen or mine):
                    raise StoreError(
                        f"Store {self.url}: a connection pooler there (such as pgbouncer) lends "
                        "server processes for a transaction or a statement only, and a store needs "
                        "its own for a session; give the address of the database itself or of the "
                        "pooler's session mode (pool_mode = session)."
                    )
                first_seen = mine
                if (mine["pid"], others["pid"]) == pids:
                    return  # the numbers are the pooler's

    def wait(self) -> None:
        """Wait until the server accepts connections, if it is restarting. Raises psycopg.Error if
        it does not."""
        since, warned = time.monotonic(), False
        while True:
            try:
                self._connect().close()
                return
            except psycopg.OperationalError as error:
                why = _server_message(error)
                if time.monotonic() - since >= _patience(why):
                    raise
                if not warned:
                    log.warning("Store %s: %s; waiting for it", self.url, why)
                warned = True
            time.sleep(RETRY_PAUSE)

    def vacuum(self) -> None:
        """Rewrite the tables without free space. Readers and writers of a table wait."""
        try:
            with closing(self.connect()) as conn:
                conn.execute("vacuum (full, analyze)")
        except psycopg.Error as error:
            raise self.to_store_error(error) from error

    def to_store_error(self, error: Exception) -> Exception:
        if isinstance(error, psycopg.DataError | psycopg.IntegrityError | UnicodeError):
            return Invalid(f"A value cannot be stored: {_server_message(error)}.")
        if not isinstance(error, psycopg.Error):
            return error
        message = _server_message(error)
        if isinstance(error, psycopg.errors.DiskFull):
            message = "the server's disk is full; free some space and run the same command again"
        advice = next((text for pattern, text in ADVICE if re.search(pattern, message)), None)
        return Unavailable(f"Store {self.url}: {message}{f'; {advice}' if advice else ''}.")


def configure(conn: psycopg.Connection[Any]) -> None:
    """Send booleans as integers, and all integers with one size, so that each statement is prepared
    only once. Apply `SETTINGS`, which a store needs in each session."""
    conn.adapters.register_dumper(int, Int8Dumper)
    conn.adapters.register_dumper(bool, _FlagDumper)
    conn.execute(SETTINGS)


class _FlagDumper(Int8Dumper):
    def dump(self, obj: bool) -> bytes:
        return b"1" if obj else b"0"


def _one(rows: psycopg.Cursor[DictRow]) -> DictRow:
    (row,) = rows
    return row


def _patience(why: str) -> float:
    if re.search("starting up|shutting down|recovery|not yet accepting", why):
        return STARTING_PATIENCE
    return REFUSED_PATIENCE if re.search("refused|No such file", why) else 0.0


def _server_message(error: Exception) -> str:
    """Return the server's message without the driver's list of tried addresses."""
    primary = error.diag.message_primary if isinstance(error, psycopg.Error) else None
    lines = (primary or str(error) or type(error).__name__).strip().splitlines()
    return re.sub(r"^.*(?:FATAL|ERROR):\s+", "", lines[0]).rstrip(".")
