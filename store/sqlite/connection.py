"""SQLite connections: the file, its writer and readers, and the translation of its errors."""

from __future__ import annotations

import os
import sqlite3
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl

from agentrl.errors import Invalid, StoreError, Unavailable
from agentrl.store.sql.database import Parameters

LOCK_PATIENCE = 60.0  # seconds to wait for other processes' locks, held for milliseconds
# Errors for values that cannot be stored: integers of more than 64 bits, invalid Unicode.
UNFIT = (
    OverflowError,
    UnicodeError,
    sqlite3.DataError,
    sqlite3.IntegrityError,
    sqlite3.InterfaceError,
)
LOCK_PAUSE = 0.001  # seconds between two tries for the write lock
CHECKPOINT_ROWS = 1000  # rows written between two checkpoints, each of which costs two disk syncs
LARGEST_LOG = 16_000  # pages of write-ahead log after which the writer itself makes a checkpoint
CACHE_KIB = 16_384  # pages of a connection that are kept: a transaction of a prune fits
ADVICE = {
    "MOVED": "the file was deleted, moved or replaced while it was in use; start again where it is "
    "now",
    "SQLITE_NOTADB": "it is not an SQLite database; choose another path",
    "SQLITE_CORRUPT": "the file is damaged; restore a copy or choose another path",
    "SQLITE_CANTOPEN": "it cannot be opened; check that the folder exists and is writable",
    "SQLITE_READONLY": "it cannot be written; check its permissions",
    "SQLITE_PERM": "it cannot be written; check its permissions",
    "SQLITE_FULL": "the disk is full; free some space and run the same command again",
    "SQLITE_IOERR": "the disk refuses to read or write; check it, and the space on it",
    "SQLITE_BUSY": "another process holds its write lock; wait if it is a vacuum, else end it",
}


class SqliteConnection(sqlite3.Connection):
    shared = False

    def ask(self, sql: str, parameters: Parameters = (), /) -> ReadRows:
        """Execute and fetch all rows: SQLite compiles a statement again while it is being read."""
        return ReadRows(self.execute(sql, parameters).fetchall())


class ReadRows(list[Any]):
    """Fetched rows with the interface of a cursor."""

    def fetchone(self) -> Any:
        return self.pop(0) if self else None

    def fetchall(self) -> list[Any]:
        return self

    @property
    def rowcount(self) -> int:
        return len(self)


@dataclass(frozen=True, slots=True)
class Location:
    """A store file and its options, from `sqlite:///path?synchronous=full` or a bare path.

    `normal` survives the death of any process, `full` also a power cut, at a disk sync per commit.
    """

    path: Path
    synchronous: str = "normal"
    readonly: bool = False  # no connection may write

    @classmethod
    def parse(cls, url: str, *, readonly: bool = False) -> Location:
        if "://" not in url:
            return cls(_file(url, url), readonly=readonly)
        base, _, query = url.partition("?")
        path = base.removeprefix("sqlite:///") if base.startswith("sqlite:///") else ""
        options = dict(parse_qsl(query, keep_blank_values=True))
        synchronous = options.pop("synchronous", "normal")
        if options or synchronous not in ("normal", "full"):
            raise StoreError(
                f"Store URL {url!r} has an unknown option: use ?synchronous=normal or "
                "?synchronous=full."
            )
        return cls(_file(path, url), synchronous, readonly)

    @property
    def url(self) -> str:
        option = "" if self.synchronous == "normal" else f"?synchronous={self.synchronous}"
        return f"sqlite:///{self.path}{option}"

    def connect(self, *, readonly: bool = False) -> SqliteConnection:
        """Open a connection in autocommit mode: transactions begin explicitly."""
        conn = sqlite3.connect(
            self._readonly_uri() if self.readonly else self.path,
            uri=self.readonly,
            timeout=LOCK_PATIENCE,
            isolation_level=None,
            check_same_thread=False,  # used by one thread, closed by another
            cached_statements=256,
            factory=SqliteConnection,
        )
        conn.row_factory = sqlite3.Row
        conn.execute(f"pragma synchronous = {self.synchronous}")
        conn.execute(f"pragma wal_autocheckpoint = {LARGEST_LOG}")
        conn.execute(f"pragma cache_size = -{CACHE_KIB}")
        if readonly or self.readonly:
            conn.execute("pragma query_only = on")
        return conn

    def _readonly_uri(self) -> str:
        """Return the URI of a read-only connection. On a read-only disk SQLite cannot create the
        files that coordinate readers and writers, but then there is no writer."""
        log = self.path.with_name(f"{self.path.name}-wal")
        frozen = not os.access(self.path.parent, os.W_OK) and not log.exists()
        return f"{self.path.as_uri()}?mode=ro{'&immutable=1' if frozen else ''}"

    def vacuum(self) -> None:
        """Rewrite the file without free pages. Other writers wait, readers do not."""
        with self.translated_errors(), closing(self.connect()) as conn:
            conn.execute("vacuum")
            conn.execute("pragma wal_checkpoint(truncate)")

    def backup(self, file: Path) -> None:
        """Copy a snapshot of the store to a new file. Writers do not wait."""
        partial = file.with_name(f"{file.name}.tmp")
        partial.unlink(missing_ok=True)  # left by a killed backup
        with self.translated_errors(), closing(replace(self, readonly=True).connect()) as conn:
            with closing(sqlite3.connect(partial)) as copy:
                conn.backup(copy)
            partial.replace(file)

    @contextmanager
    def translated_errors(self) -> Iterator[None]:
        """Convert SQLite's errors to store errors that name the file."""
        try:
            yield
        except (sqlite3.Error, *UNFIT) as error:
            raise to_store_error(self.path, error) from error


def execute_when_free(conn: sqlite3.Connection, statement: str) -> sqlite3.Cursor:
    """Execute a statement that fails without waiting while another process has a lock; retry for
    `LOCK_PATIENCE` seconds."""
    deadline = time.monotonic() + LOCK_PATIENCE
    while True:
        try:
            return conn.execute(statement)
        except sqlite3.OperationalError as error:
            busy = error.sqlite_errorcode & 0xFF == sqlite3.SQLITE_BUSY
            if not busy or time.monotonic() > deadline:
                raise
        time.sleep(LOCK_PAUSE)


class StoreFileMoved(sqlite3.OperationalError):
    """The file is no longer at its path: nobody would find later writes."""

    sqlite_errorname = "MOVED"


class StoreFile:
    """Identifies the file of an open store by its inode, which is unique while it is open."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._number = self._found()

    def check(self) -> None:
        """Raise StoreFileMoved if the path now leads to another file, or to none."""
        if self._found() != self._number:
            raise StoreFileMoved

    def cause(self, error: Exception) -> Exception:
        """Return StoreFileMoved if the file has moved, which caused the error; else `error`."""
        moved = isinstance(error, sqlite3.Error) and self._found() != self._number
        return StoreFileMoved() if moved else error

    def _found(self) -> tuple[int, int] | None:
        try:
            found = os.stat(self._path)  # noqa: PTH116 - on the path of every commit
        except OSError:
            return None
        return found.st_dev, found.st_ino


class _Connections:
    """Base class of the writing and the reading connections of a store file."""

    def __init__(self, location: Location, file: StoreFile) -> None:
        self._location, self._file = location, file

    def can_retry(self, error: Exception, since: float) -> bool:
        return False  # `begin` waits for the only lock

    def to_store_error(self, error: Exception) -> Exception:
        return to_store_error(self._location.path, self._file.cause(error))


class SqliteSession(_Connections):
    """The writing connection of a process: see `database.Session`."""

    errors: tuple[type[Exception], ...] = (sqlite3.Error,)

    def __init__(
        self,
        location: Location,
        file: StoreFile,
        committed: Callable[[sqlite3.Connection], None],
        notify_others: Callable[[int], None],
        clock: Callable[[], float],
    ) -> None:
        super().__init__(location, file)
        self._clock, self._committed = clock, committed  # called after every commit
        self._notify_others = notify_others
        self.conn = location.connect()  # waits while another process recovers or closes the file
        self.conn.execute("pragma busy_timeout = 0")  # from here on `begin` waits by itself

    def begin(self) -> float:
        """Take the write lock of the file, trying every millisecond: SQLite's own waiting sleeps
        for up to 100 ms at a time, so a busy process would starve others."""
        self._file.check()
        execute_when_free(self.conn, "begin immediate")
        return self._clock()

    def flush(self) -> None:
        """Do nothing: statements are executed synchronously."""

    def commit(self, topics: int) -> None:
        self.conn.execute("commit")
        self._committed(self.conn)
        if topics:
            self._notify_others(topics)

    def tell(self, topics: int) -> None:
        self._notify_others(topics)

    def rollback(self) -> None:
        if self.conn.in_transaction:
            self.conn.execute("rollback")

    def can_continue(self, error: Exception) -> bool:
        return self.conn.in_transaction  # a full disk rolls back the whole transaction

    def close(self) -> None:
        self.conn.close()


class WalCheckpointer:
    """A thread that copies the write-ahead log to the file by passive checkpoints, which block
    neither readers nor writers."""

    def __init__(self, location: Location) -> None:
        self._location = location
        self._seen = 0
        self._due = threading.Event()
        self._closed = False
        self._thread = threading.Thread(target=self._serve, name="store-checkpoint", daemon=True)
        self._thread.start()

    def committed(self, conn: sqlite3.Connection) -> None:
        """Called by the writer after a commit."""
        if conn.total_changes - self._seen >= CHECKPOINT_ROWS:
            self._seen = conn.total_changes
            self._due.set()

    def close(self) -> None:
        self._closed = True
        self._due.set()
        self._thread.join()

    def _serve(self) -> None:
        conn = self._location.connect()
        conn.execute("pragma busy_timeout = 0")  # skipped if another process makes a checkpoint
        try:
            while self._due.wait() and not self._closed:
                self._due.clear()
                with suppress(sqlite3.Error):  # the writer has the same error and reports it
                    conn.execute("pragma wal_checkpoint(passive)").fetchall()
        finally:
            conn.close()


class SqliteReadPool(_Connections):
    """A read-only connection for each reading thread, never blocked by the writer."""

    threads = 2
    errors: tuple[type[Exception], ...] = (sqlite3.Error, *UNFIT)

    def __init__(self, location: Location, file: StoreFile) -> None:
        super().__init__(location, file)
        self.name = str(location.path)
        self._local = threading.local()
        self._opened: list[sqlite3.Connection] = []

    @contextmanager
    def read_transaction(self) -> Iterator[sqlite3.Connection]:
        self._file.check()
        conn: sqlite3.Connection | None = getattr(self._local, "conn", None)
        if conn is None:
            conn = self._location.connect(readonly=True)
            self._opened.append(conn)
            self._file.check()  # the file may have been replaced during opening
            self._local.conn = conn
        conn.execute("begin")
        try:
            yield conn
        finally:
            if conn.in_transaction:  # some errors end the transaction
                conn.execute("rollback")

    def close(self) -> None:
        for conn in self._opened:
            conn.close()


def to_store_error(path: Path, error: Exception) -> Exception:
    """Convert SQLite's errors to store errors with advice; return others unchanged."""
    if isinstance(error, UNFIT):
        return Invalid(f"A value cannot be stored: {error}.")
    if not isinstance(error, sqlite3.Error):
        return error
    name = getattr(error, "sqlite_errorname", "") or ""
    what = next((text for code, text in ADVICE.items() if name.startswith(code)), str(error))
    return Unavailable(f"Store {path}: {what}.")


def _file(path: str, url: str) -> Path:
    if not path or path == ":memory:":
        raise StoreError(
            f"Store URL {url!r} does not name a file: use sqlite:///runs/store.db, or "
            "sqlite:////absolute/store.db."
        )
    return Path(path).absolute()
