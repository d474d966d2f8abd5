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
from agentrl.store.postgres.pipeline import Pipeline, StatementResult

PATIENCE = 60.0  # seconds to wait for a server that is away before callers get an error
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

logging.getLogger("psycopg.pool").setLevel(logging.ERROR)  # it warns of each try to reconnect


class PostgresSession:
    """The writing connection of a process: see `database.Session`."""

    errors: tuple[type[Exception], ...] = (psycopg.Error,)

    def __init__(self, server: PostgresServer, clock: Callable[[], float] | None = None) -> None:
        self._server, self._clock = server, clock
        self._raw = server.connect()
        self.conn = Pipeline(self._raw, self._ask_id)
        self._open = False
        self._asked: StatementResult | None = None  # for the id of the open transaction
        self._away: psycopg.OperationalError | None = None  # why the last try to connect failed

    @property
    def pid(self) -> int:
        """Of the server process, by which a listener knows the notifications of its own process."""
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
        """Other transactions see this one, and get its locks, before it is on the disk; its caller
        waits for the disk afterwards, together with the callers of all others. What is made out of
        something seen comes later in the log, so it does not survive a power cut alone.

        What has not waited for anything yet is sent together with the commit. It has no id then; if
        the connection breaks, its verbs are simply repeated: they have decided nothing by what they
        read."""
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
        with contextlib.suppress(psycopg.Error):  # of what nobody waits for any more
            self.conn.sync()
        with contextlib.suppress(psycopg.OperationalError):  # it went with its connection
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
        """None before the answer, too."""
        known = self._asked is not None and self._asked.raw is not None
        return _one(self._asked)["id"] if self._asked and known else None

    def _ask_id(self) -> None:
        """With every wait, until it is known: a transaction has one when it has locked or written
        something."""
        if self._open and self._id is None:
            self._asked = self.conn.send(ID)

    def _reconnect(self, since: float) -> bool:
        self._raw.close()
        while time.monotonic() - since < PATIENCE:
            try:
                self._raw = self._server.connect()
            except psycopg.OperationalError as error:
                self._away = error
                time.sleep(PAUSE)
            else:
                self.conn = Pipeline(self._raw, self._ask_id)
                return True
        return False

    def _took_place(self, transaction: str) -> bool:
        """Whether the transaction, whose commit met an error, was committed all the same."""
        since = time.monotonic()
        while self._raw.closed and self._reconnect(since):
            with contextlib.suppress(psycopg.OperationalError):
                while (status := self._status(transaction)) == "in progress":
                    time.sleep(PAUSE)
                self.conn.execute(DURABLE)
                self.conn.sync()
                return status == "committed"
        return False

    def _status(self, transaction: str) -> str | None:
        query = "select pg_xact_status(%s::xid8) as status"
        try:
            row = _one(self.conn.execute(query, (transaction,)))
        except psycopg.DataError:  # a number that this server, restored or promoted, never gave out
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
