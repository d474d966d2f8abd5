"""Transactions on PostgreSQL: the writer's session and the readers' connections.

Always true: a transaction is committed once. If its connection breaks during the commit, nobody
knows whether it was committed; the next connection asks the server (`pg_xact_status`) before
anything is tried again. After a deadlock or a lost connection the transaction runs again, for up to
`PATIENCE` seconds.
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

from agentrl.store.postgres.connection import PAUSE, PostgresConnection, PostgresServer, configure

PATIENCE = 60.0  # seconds to wait for a server that is away before callers get an error
CHANNEL = "agentrl"
BEGIN = b"begin; select extract(epoch from clock_timestamp())::float8 as now"
AGAIN = (
    psycopg.errors.DeadlockDetected,
    psycopg.errors.SerializationFailure,
    psycopg.errors.LockNotAvailable,
)

logging.getLogger("psycopg.pool").setLevel(logging.ERROR)  # it warns of each try to reconnect


class PostgresSession:
    """The writing connection of a process: see `database.Session`."""

    errors: tuple[type[Exception], ...] = (psycopg.Error,)

    def __init__(self, server: PostgresServer, clock: Callable[[], float] | None = None) -> None:
        self._server, self._clock = server, clock
        self._raw = server.connect()
        self.conn = PostgresConnection(self._raw)
        self._away: psycopg.OperationalError | None = None  # why the last try to connect failed

    @property
    def pid(self) -> int:
        """Of the server process, by which a listener knows the notifications of its own process."""
        return self._raw.info.backend_pid

    def begin(self) -> float:
        if self._clock is not None:
            self.conn.execute("begin")
            return self._clock()
        cursor = self._raw.execute(BEGIN, prepare=False)  # two statements, which go unprepared
        cursor.nextset()
        (row,) = cursor.fetchall()
        return float(row["now"])

    def commit(self, topics: int) -> None:
        if topics:
            self.conn.execute("select pg_notify(%s, %s)", (CHANNEL, str(topics)))
        query = "select pg_current_xact_id_if_assigned()::text as id"
        (row,) = self.conn.execute(query).fetchall()
        try:
            self.conn.execute("commit")
        except psycopg.OperationalError:
            if row["id"] is None or not self._took_place(row["id"]):
                raise

    def rollback(self) -> None:
        with contextlib.suppress(psycopg.OperationalError):  # it went with its connection
            if self._raw.info.transaction_status is not TransactionStatus.IDLE:
                self.conn.execute("rollback")

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

    def _reconnect(self, since: float) -> bool:
        self._raw.close()
        while time.monotonic() - since < PATIENCE:
            try:
                self._raw = self._server.connect()
            except psycopg.OperationalError as error:
                self._away = error
                time.sleep(PAUSE)
            else:
                self.conn = PostgresConnection(self._raw)
                return True
        return False

    def _took_place(self, transaction: str) -> bool:
        """Whether the transaction, whose commit met an error, was committed all the same."""
        since = time.monotonic()
        while self._raw.closed and self._reconnect(since):
            with contextlib.suppress(psycopg.OperationalError):
                while (status := self._status(transaction)) == "in progress":
                    time.sleep(PAUSE)
                return status == "committed"
        return False

    def _status(self, transaction: str) -> str | None:
        query = "select pg_xact_status(%s::xid8) as status"
        try:
            (row,) = self.conn.execute(query, (transaction,)).fetchall()
        except psycopg.DataError:  # a number that this server, restored or promoted, never gave out
            return None
        status: str | None = row["status"]
        return status


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
            code is None or code.startswith(("08", "57P"))  # the connection, not the statement
        )
        if not lost or time.monotonic() - since > PATIENCE:
            return False
        time.sleep(PAUSE)  # the pool makes new connections meanwhile
        return True

    def to_store_error(self, error: Exception) -> Exception:
        return self._server.to_store_error(error)

    def close(self) -> None:
        self._pool.close()
