"""Copies the write-ahead log back into the store file, beside the writer instead of inside it.

Owns: one thread with a connection of its own. Always true: nothing depends on it. The writer's own
checkpoint (`connection.CHECKPOINT`) bounds the log, and where this thread has been faster it finds
next to nothing to copy; otherwise every so many commits would wait for the disk.
"""

from __future__ import annotations

import contextlib
import sqlite3
import threading

from agentrl.store.sqlite.connection import Location

CHANGES = 1000  # rows written until it is worth two disk syncs


class WalCheckpointer:
    """A passive checkpoint blocks neither readers nor writers."""

    def __init__(self, location: Location) -> None:
        self._location = location
        self._seen = 0
        self._due = threading.Event()
        self._closed = False
        self._thread = threading.Thread(target=self._serve, name="store-checkpoint", daemon=True)
        self._thread.start()

    def committed(self, conn: sqlite3.Connection) -> None:
        """Called by the writer after a commit."""
        if conn.total_changes - self._seen >= CHANGES:
            self._seen = conn.total_changes
            self._due.set()

    def close(self) -> None:
        self._closed = True
        self._due.set()
        self._thread.join()

    def _serve(self) -> None:
        conn = self._location.connect()
        conn.execute("pragma busy_timeout = 0")  # another process is at it: so much the better
        try:
            while self._due.wait() and not self._closed:
                self._due.clear()
                with contextlib.suppress(sqlite3.Error):  # the writer meets the same, and says so
                    conn.execute("pragma wal_checkpoint(passive)").fetchall()
        finally:
            conn.close()
