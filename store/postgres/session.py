"""Transactions on PostgreSQL: the writer's session and the readers' connections.

Invariant: a transaction is committed only once. If its connection breaks during the commit, its
state is unknown; the next connection asks the server (`pg_xact_status`) before a retry. After a
deadlock or a lost connection the transaction is retried, for up to `PATIENCE` seconds.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable, Iterator

import psycopg
from psycopg.pq import TransactionStatus
from psycopg.rows import DictRow, dict_row
from psycopg_pool import ConnectionPool

from agentrl.store.postgres.connection import (
    RETRY_PAUSE,
    PostgresConnection,
    PostgresServer,
    configure,
)
from agentrl.store.postgres.pipeline import Pipeline, StatementResult

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

logging.getLogger("psycopg.pool").setLevel(logging.ERROR)  # it warns of each reconnect


class PostgresSession:
    """The writing connection of a process: see `database.Session`."""

    errors: tuple[type[Exception], ...] = (psycopg.Error,)

    def __init__(self, server: PostgresServer, clock: Callable[[], float] | None = None) -> None:
        self._server, self._clock = server, clock
        self._raw = server.connect()
        self.conn = Pipeline(self._raw, self._ask_id)
        self._open = False
        self._asked: StatementResult | None = None  # query for the open transaction's id
        self._away: psycopg.OperationalError | None = None  # error of the last try to connect

    @property
    def pid(self) -> int:
        """Pid of the server process, which identifies this process's own notifications."""
        return self._raw.info.backend_pid

    def begin(self) -> float | Callable[[], float]:
        self._open, self._asked = True, None
        self.conn.execute("begin")
        now = self.conn.execute(TIME)
        if self._clock is not None:
            return self._clock()
        return lambda: float(_one(now)["now"])

    def flush(self) -> None:
        self.conn.sync()

    def commit(self, topics: int) -> None:
        """Commit without waiting for the disk: other transactions see this one, and get its locks,
        before it is durable. Then wait for the disk, together with the callers of all others.
        Transactions that depend on it are later in the log, so they do not survive a power cut
        without it.

        A transaction that has not waited for any statement is sent together with its commit, and
        has no id: if the connection breaks, its verbs are repeated. That is safe because they
        decided nothing by what they read."""
        if topics:
            self.conn.execute(NOTIFY, (CHANNEL, str(topics)))
        blind = self._asked is None
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

    def tell(self, topics: int) -> None:
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
        known = self._asked is not None and self._asked.raw is not None
        return _one(self._asked)["id"] if self._asked and known else None

    def _ask_id(self) -> None:
        """Query the id with every wait until it is known: a transaction gets one with its first
        lock or write."""
        if self._open and self._id is None:
            self._asked = self.conn.send(ID)

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
            row = _one(self.conn.execute(query, (transaction,)))
        except psycopg.DataError:  # an id that this restored or promoted server never assigned
            return None
        status: str | None = row["status"]
        return status


def _one(result: StatementResult) -> DictRow:
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
