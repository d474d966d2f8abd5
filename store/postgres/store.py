"""The store in a PostgreSQL database, for any process that reaches the server.

The verbs are those of SQLite, where they run one at a time. Here several processes run them
concurrently, at READ COMMITTED: a statement sees all earlier commits, and a statement that locks a
row sees its newest version. A verb locks the rows that its decisions depend on:

  * The rollout's row: `claim` and the expiry of leases lock rows `for update skip locked`; `finish`
    and `cancel` wait for theirs. So a rollout is claimed once and ends once, and lease and fence of
    the attempt are checked after the wait.
  * The attempt's row: locked by `add_transitions` and `add_spans`. So a call is stored either
    before the attempt's end or late, and calls of one attempt see each other in the tree.
  * The run's row, for epoch and step: locked by `claim_groups`, `commit_step` and other verbs with
    an epoch; `open_run` changes it, so a fenced owner waits and then sees the new epoch.
  * The group's row, for size and state: locked by `enqueue` while the group grows.
  * Claim ids and request ids have separate locks: a repeat in another process waits for the first
    call.
  * Data sets have one lock: an addition to a version precedes its completion, or is refused.

A verb takes its locks in the order rollout, attempt, run, group; the rows that all processes share
(run, group, feed) are written at the end of the transaction, in order of name. If a deadlock occurs
nevertheless, PostgreSQL aborts one of the transactions and its writer runs it again.

Leases use the server's clock, not those of the machines that open the store.

Event numbers are assigned under a lock that is taken last and held until the commit: they become
visible in order, so a reader that has seen one has missed none before it.

A database is migrated to the schema of this version under one lock, or refused. The scripts
`sql/postgres/migrations/*.sql` have the same names and meaning as those of SQLite; the table
`_agentrl_migrations` lists applied ones.

Processes that share a database notify each other of changes by `LISTEN` and `NOTIFY`. The listener
owns one connection and its thread. Invariant: a notification is only a hint to query the store. It
is part of its transaction, so it arrives after the commit. A notification lost with a connection,
or a lock released by a dead process, costs at most `POLL_PAUSE` seconds.
"""

from __future__ import annotations

import contextlib
import os
import select
import threading
from collections.abc import Callable

import psycopg
from psycopg.rows import DictRow

from agentrl.core.errors import NotFound, StoreError
from agentrl.store.postgres.connection import (
    CHANNEL,
    RETRY_PAUSE,
    PostgresReadPool,
    PostgresServer,
    PostgresSession,
)
from agentrl.store.sql import database
from agentrl.store.sql.database import ALL, Feed
from agentrl.store.sql.store import SqlStore


class PostgresStore(SqlStore):
    def __init__(
        self,
        url: str,
        *,
        create: bool = True,
        readonly: bool = False,
        clock: Callable[[], float] | None = None,
    ) -> None:
        server = PostgresServer.parse(url, readonly=readonly)
        prepare(server, create=create)
        feed = Feed()
        try:
            session = None if readonly else PostgresSession(server, clock)
            own_pid = (lambda: 0) if session is None else (lambda: session.pid)
            listener = ChangeListener(server, feed.notify, own_pid)
        except psycopg.Error as error:
            raise server.to_store_error(error) from error
        super().__init__(
            server.url,
            session,
            PostgresReadPool(server),
            feed,
            stop_listening=listener.close,
            shrink=server.vacuum,
        )


LOCK = 1634888754  # advisory lock for schema changes
SCRIPTS = database.migrations("postgres/migrations")


def prepare(server: PostgresServer, *, create: bool = True) -> None:
    """Apply missing migrations to the first schema of the search path.

    Raises StoreError for a database without a store (unless `create`), with other tables, behind a
    pooler that shares sessions, or written by a newer version of agentrl; Unavailable if the server
    does not respond. Changes nothing on a `readonly` server, see `database.check_readable`."""
    try:
        server.wait()
        server.check_sessions()
        with server.connect() as conn:
            missing = pending(conn, server, create=create and not server.readonly)
            if server.readonly:
                database.check_readable(missing, server.url)
            elif missing:
                _apply(conn, server, create=create)
    except psycopg.Error as error:
        raise server.to_store_error(error) from error


def pending(
    conn: psycopg.Connection[DictRow], server: PostgresServer, *, create: bool
) -> list[str]:
    """List the migrations that the database lacks. Raises StoreError if it has unknown ones."""
    tables = "select tablename from pg_tables where schemaname = current_schema()"
    existing = {row["tablename"] for row in conn.execute(tables)}
    if "_agentrl_migrations" not in existing:
        if existing:
            raise StoreError(
                f"{server.url} is a database but not an agentrl store: choose an empty one, or an "
                "empty schema of it with ?options=-csearch_path%3DNAME."
            )
        if not create:
            raise NotFound(f"There is no store at {server.url}: check the name.")
        return list(SCRIPTS)
    applied = {row["name"] for row in conn.execute("select name from _agentrl_migrations")}
    return database.missing_migrations(SCRIPTS, applied, server.url)


def _apply(conn: psycopg.Connection[DictRow], server: PostgresServer, *, create: bool) -> None:
    with conn.transaction():  # processes that start together apply each script once
        conn.execute("select pg_advisory_xact_lock(%s)", (LOCK,))
        todo = pending(conn, server, create=create)
        conn.execute(
            "create table if not exists _agentrl_migrations ("
            "name text primary key, applied_at timestamptz not null default now())"
        )
        for name in todo:
            conn.execute(SCRIPTS[name].read_bytes())
            conn.execute("insert into _agentrl_migrations (name) values (%s)", (name,))


POLL_PAUSE = 5.0  # seconds


class ChangeListener:
    """Passes the notifications of other processes to `notify`. `own_pid`: pid of the writer's
    server process, whose notifications are ignored because the writer notifies this process
    directly."""

    def __init__(
        self, server: PostgresServer, notify: Callable[[int], None], own_pid: Callable[[], int]
    ) -> None:
        self._server = server
        self._notify = notify
        self._own_pid = own_pid
        self._conn: psycopg.Connection[DictRow] | None = self._connect()
        self._wake, self._waker = os.pipe()
        self._open = True
        self._silent = False
        self._thread = threading.Thread(target=self._listen, name="store-listener", daemon=True)
        self._thread.start()

    def close(self) -> None:
        if not self._open:
            return
        self._open = False
        os.write(self._waker, b"\0")
        self._thread.join()
        os.close(self._wake)
        os.close(self._waker)

    def _connect(self) -> psycopg.Connection[DictRow]:
        conn = self._server.connect()
        conn.execute(f"listen {CHANNEL}")
        return conn

    def _listen(self) -> None:
        while not self._closed(POLL_PAUSE if self._conn else RETRY_PAUSE):
            try:
                if self._conn is None:
                    self._conn = self._connect()
                    topics = ALL
                else:
                    topics = self._heard(self._conn)
            except psycopg.OperationalError:  # nothing can change without the server
                self._stop_listening()
                continue
            except Exception:  # noqa: BLE001 - waiting tasks must query, and get the error
                self._stop_listening()
                topics = ALL
            if topics:
                self._notify(topics)
        self._stop_listening()

    def _stop_listening(self) -> None:
        if self._conn is not None:
            self._conn.close()
        self._conn = None

    def _closed(self, seconds: float) -> bool:
        """Wait for a notification, `seconds`, or `close`; return whether it was `close`."""
        files = select.poll()  # unlike `select`, supports any file descriptor
        files.register(self._wake, select.POLLIN)
        if self._conn is not None:
            with contextlib.suppress(psycopg.OperationalError):
                files.register(self._conn.fileno(), select.POLLIN)
        ready = {number for number, _ in files.poll(seconds * 1000)}
        self._silent = not ready
        return self._wake in ready

    def _heard(self, conn: psycopg.Connection[DictRow]) -> int:
        """Return the topics of all pending notifications; all topics after a silence."""
        if self._silent:
            return ALL
        topics, own_pid = 0, self._own_pid()
        conn.pgconn.consume_input()
        while (
            notification := conn.pgconn.notifies()
        ) is not None:  # ten times faster than psycopg's own
            if (
                notification.be_pid != own_pid and notification.extra.isdigit()
            ):  # other programs may notify too
                topics |= int(notification.extra) & ALL
        return topics
