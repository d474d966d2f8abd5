"""SQLite connections: the file, its writer and readers, and its errors in words for users."""

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
from agentrl.store.database import Parameters

BUSY = 60.0  # seconds to wait for the locks of other processes, which hold them for milliseconds
# Errors for a value that no column takes: integers of more than 64 bits, text that is no Unicode.
UNFIT = (
    OverflowError,
    UnicodeError,
    sqlite3.DataError,
    sqlite3.IntegrityError,
    sqlite3.InterfaceError,
)
PAUSE = 0.001  # seconds between two tries for the write lock
CHANGES = 1000  # rows written from one checkpoint, which costs two disk syncs, to the next
CHECKPOINT = 16_000  # pages of write-ahead log before the writer itself copies them back
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
    def ask(self, sql: str, parameters: Parameters = (), /) -> ReadRows:
        """Read at once: the next would compile a statement again that is still being read."""
        return ReadRows(self.execute(sql, parameters).fetchall())


class ReadRows(list[Any]):
    """As a cursor."""

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

    `normal` survives the death of any process; `full` also a power cut, at one disk sync a commit.
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

    def connect(self, *, readonly: bool = False, timeout: float = BUSY) -> SqliteConnection:
        """A connection in autocommit mode: every transaction is begun by hand."""
        conn = sqlite3.connect(
            self._readonly_uri() if self.readonly else self.path,
            uri=self.readonly,
            timeout=timeout,
            isolation_level=None,
            check_same_thread=False,  # each is used by one thread, but closed by another
            cached_statements=256,
            factory=SqliteConnection,
        )
        conn.row_factory = sqlite3.Row
        conn.execute(f"pragma synchronous = {self.synchronous}")
        conn.execute(f"pragma wal_autocheckpoint = {CHECKPOINT}")
        if readonly or self.readonly:
            conn.execute("pragma query_only = on")
        return conn

    def _readonly_uri(self) -> str:
        """On a disk that cannot be written, where SQLite cannot make the two files with which
        readers and writers find each other, there is no writer to be found."""
        log = self.path.with_name(f"{self.path.name}-wal")
        frozen = not os.access(self.path.parent, os.W_OK) and not log.exists()
        return f"{self.path.as_uri()}?mode=ro{'&immutable=1' if frozen else ''}"

    def vacuum(self) -> None:
        """Writes the file anew, without free pages. Other writers wait for it, readers do not."""
        with self.translated_errors(), closing(self.connect()) as conn:
            conn.execute("vacuum")
            conn.execute("pragma wal_checkpoint(truncate)")

    def backup(self, file: Path) -> None:
        """Copies the store, as it is at one moment, to a new file. Writers do not wait."""
        partial = file.with_name(f"{file.name}.tmp")
        partial.unlink(missing_ok=True)  # of a backup that was killed
        with self.translated_errors(), closing(replace(self, readonly=True).connect()) as conn:
            with closing(sqlite3.connect(partial)) as copy:
                conn.backup(copy)
            partial.replace(file)

    @contextmanager
    def translated_errors(self) -> Iterator[None]:
        """Turns SQLite's errors into one sentence that names the file."""
        try:
            yield
        except (sqlite3.Error, *UNFIT) as error:
            raise to_store_error(self.path, error) from error


def execute_when_free(conn: sqlite3.Connection, statement: str) -> sqlite3.Cursor:
    """Executes what SQLite refuses while another process has a lock, and does not wait for itself,
    until it is done or `BUSY` seconds have passed."""
    deadline = time.monotonic() + BUSY
    while True:
        try:
            return conn.execute(statement)
        except sqlite3.OperationalError as error:
            busy = error.sqlite_errorcode & 0xFF == sqlite3.SQLITE_BUSY
            if not busy or time.monotonic() > deadline:
                raise
        time.sleep(PAUSE)


class StoreFileMoved(sqlite3.OperationalError):
    """The file is not at its path any more: nobody would find what is written."""

    sqlite_errorname = "MOVED"


class StoreFile:
    """The file that a store was opened at, by its inode: no other file has it while it is open."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._number = self._found()

    def check(self) -> None:
        """Raises StoreFileMoved if the path leads to another file now, or to none."""
        if self._found() != self._number:
            raise StoreFileMoved

    def cause(self, error: Exception) -> Exception:
        """StoreFileMoved if the file has moved, which then caused the error; else the error."""
        moved = isinstance(error, sqlite3.Error) and self._found() != self._number
        return StoreFileMoved() if moved else error

    def _found(self) -> tuple[int, int] | None:
        try:
            found = os.stat(self._path)  # noqa: PTH116 - on the path of every commit
        except OSError:
            return None
        return found.st_dev, found.st_ino


class _Connections:
    """What the writing and the reading connections of a store file have in common."""

    def __init__(self, location: Location, file: StoreFile) -> None:
        self._location, self._file = location, file

    def can_retry(self, error: Exception, since: float) -> bool:
        return False  # the one lock is taken first, and waited for there

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
        clock: Callable[[], float],
    ) -> None:
        super().__init__(location, file)
        self._clock, self._committed = clock, committed  # which is called after every commit
        self.conn = location.connect()  # waits while another process recovers or closes the file
        self.conn.execute("pragma busy_timeout = 0")  # from here on `begin` waits by itself

    def begin(self) -> float:
        """Takes the write lock of the file, trying every millisecond: SQLite's own waiting sleeps
        for up to 100 ms at a time, so that one busy process would starve the others."""
        self._file.check()
        execute_when_free(self.conn, "begin immediate")
        return self._clock()

    def flush(self) -> None:
        """Every statement was waited for."""

    def commit(self, topics: int) -> None:
        self.conn.execute("commit")
        self._committed(self.conn)

    def tell(self, topics: int) -> None:
        """The notifier does: see `SqliteStore`."""

    def rollback(self) -> None:
        if self.conn.in_transaction:
            self.conn.execute("rollback")

    def can_continue(self, error: Exception) -> bool:
        return self.conn.in_transaction  # a full disk undoes everything

    def close(self) -> None:
        self.conn.close()


class WalCheckpointer:
    """A thread that copies the write-ahead log into the file. Its passive checkpoints block neither
    readers nor writers."""

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
        conn.execute("pragma busy_timeout = 0")  # if another process does it, there is no need
        try:
            while self._due.wait() and not self._closed:
                self._due.clear()
                with suppress(sqlite3.Error):  # the writer gets the same error and reports it
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
            self._file.check()  # the path may have led to another file while it was opened
            self._local.conn = conn
        conn.execute("begin")
        try:
            yield conn
        finally:
            if conn.in_transaction:  # some errors end it by themselves
                conn.execute("rollback")

    def close(self) -> None:
        for conn in self._opened:
            conn.close()


def to_store_error(path: Path, error: Exception) -> Exception:
    """SQLite's errors as ours, with what to do; any other as it is."""
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
            f"Store URL {url!r} names no file: use sqlite:///runs/store.db, or "
            "sqlite:////absolute/store.db."
        )
    return Path(path).absolute()
