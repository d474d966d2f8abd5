"""Change notifications between processes that share a PostgreSQL database: `LISTEN` and `NOTIFY`.

Owns: one connection that listens, and its thread. Invariant: a notification is only a hint to query
the store. It is part of its transaction, so it arrives after the commit. A notification lost with a
connection, or a lock released by a dead process, costs at most `POLL_PAUSE` seconds.
"""

from __future__ import annotations

import contextlib
import os
import select
import threading
from collections.abc import Callable

import psycopg
from psycopg.rows import DictRow

from agentrl.store.postgres.connection import RETRY_PAUSE, PostgresServer
from agentrl.store.postgres.session import CHANNEL
from agentrl.store.sql.feed import ALL

POLL_PAUSE = 5.0  # seconds


class ChangeListener:
    """Passes the notifications of other processes to `notify`. `own`: pid of the writer's server
    process, whose notifications are ignored because the writer notifies this process directly."""

    def __init__(
        self, server: PostgresServer, notify: Callable[[int], None], own: Callable[[], int]
    ) -> None:
        self._server = server
        self._notify = notify
        self._own = own
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
        topics, own = 0, self._own()
        conn.pgconn.consume_input()
        while (told := conn.pgconn.notifies()) is not None:  # ten times faster than psycopg's own
            if told.be_pid != own and told.extra.isdigit():  # other programs may notify too
                topics |= int(told.extra) & ALL
        return topics
