"""The store in one SQLite file, which several processes of a machine may open.

A file is migrated to the schema of this version under one lock, or refused. The migrations are the
files `sql/migrations/*.sql` in order of name; a published one is never changed, and each has a
counterpart with the same name in `sql/postgres/migrations`. Applied ones are recorded in the table
of `sqlite_utils.migrations`, so `sqlite-utils migrate` works too; the library is imported only if a
migration must be applied.

Processes that share a file notify each other of changes. A `ChangeNotifier` owns one Unix datagram
socket per open store, in a folder of the temporary directory named after the file's device and
inode, and one thread that listens to it. Invariant: the folder, whose name is predictable, is only
used if it belongs to this user and is closed to others; a notification is one byte of topics and
only a hint to query the store. A lost one costs at most `POLL_PAUSE` seconds, because the thread
also polls the file's change counter (`pragma data_version`) and whether the file still exists.
Without sockets or a shared temporary directory, it only polls.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import socket
import sqlite3
import stat
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import parse_qsl

from agentrl.core.errors import Invalid, NotFound, StoreError, Unavailable
from agentrl.store.sql import database
from agentrl.store.sql.database import ALL, Feed, Parameters
from agentrl.store.sql.store import SqlStore

if TYPE_CHECKING:
    from sqlite_utils import Database
    from sqlite_utils.migrations import Migrations


class SqliteStore(SqlStore):
    def __init__(
        self, location: Location, *, create: bool = True, clock: Callable[[], float] | None = None
    ) -> None:
        if location.readonly:
            check(location)
        else:
            prepare(location, create=create)
        feed = Feed()
        file = StoreFile(location.path)
        notifier = ChangeNotifier(location, file, feed.notify)
        checkpoints = None if location.readonly else WalCheckpointer(location)

        def stop_listening() -> None:
            notifier.close()
            if checkpoints is not None:
                checkpoints.close()

        session = None
        if checkpoints is not None:
            session = SqliteSession(
                location, file, checkpoints.committed, notifier.notify_others, clock or time.time
            )
        read_pool = SqliteReadPool(location, file)
        super().__init__(
            location.url,
            session,
            read_pool,
            feed,
            stop_listening=stop_listening,
            shrink=location.vacuum,
        )


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
MAX_LOG_PAGES = 16_000  # pages of write-ahead log after which the writer itself makes a checkpoint
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
        conn.execute(f"pragma wal_autocheckpoint = {MAX_LOG_PAGES}")
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
    """The file is no longer at its path: later writes would be lost."""

    sqlite_errorname = "MOVED"


class StoreFile:
    """Identifies the file of an open store by its inode, which is unique while it is open."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._number = self._identity()

    def check(self) -> None:
        """Raise StoreFileMoved if the path now leads to another file, or to none."""
        if self._identity() != self._number:
            raise StoreFileMoved

    def cause(self, error: Exception) -> Exception:
        """Return StoreFileMoved if the file has moved, which caused the error; else `error`."""
        moved = isinstance(error, sqlite3.Error) and self._identity() != self._number
        return StoreFileMoved() if moved else error

    def _identity(self) -> tuple[int, int] | None:
        try:
            status = os.stat(self._path)  # noqa: PTH116 - on the path of every commit
        except OSError:
            return None
        return status.st_dev, status.st_ino


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

    def notify_others(self, topics: int) -> None:
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
        self._checkpointed = 0
        self._due = threading.Event()
        self._closed = False
        self._thread = threading.Thread(target=self._serve, name="store-checkpoint", daemon=True)
        self._thread.start()

    def committed(self, conn: sqlite3.Connection) -> None:
        """Called by the writer after a commit."""
        if conn.total_changes - self._checkpointed >= CHECKPOINT_ROWS:
            self._checkpointed = conn.total_changes
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
    advice = next((text for code, text in ADVICE.items() if name.startswith(code)), str(error))
    return Unavailable(f"Store {path}: {advice}.")


def _file(path: str, url: str) -> Path:
    if not path or path == ":memory:":
        raise StoreError(
            f"Store URL {url!r} does not name a file: use sqlite:///runs/store.db, or "
            "sqlite:////absolute/store.db."
        )
    return Path(path).absolute()


SET = "agentrl"
APPLICATION_ID = 0x61726C31  # "arl1" in the file's header: marks the database as a store
SCRIPTS = database.migrations("migrations")


def prepare(location: Location, *, create: bool = True) -> None:
    """Create the file if needed and apply missing migrations.

    Raises StoreError for a missing file (unless `create`), a file that is not a store, or one
    written by a newer version of agentrl."""
    _check_path(location, create=create)
    try:
        location.path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise StoreError(
            f"Store {location.path}: its folder cannot be created ({error.strerror}); "
            "choose a writable one."
        ) from error
    with location.translated_errors(), closing(location.connect()) as conn:
        _check_header(conn, location)
        if pending(conn, location):
            # Two processes that wait inside SQLite for each other's reads would wait forever.
            conn.execute("pragma busy_timeout = 0")
            (mode,) = execute_when_free(conn, "pragma journal_mode = wal").fetchone()
            conn.execute(f"pragma busy_timeout = {int(LOCK_PATIENCE * 1000)}")
            if mode != "wal":
                raise StoreError(
                    "The store's file system has no shared memory: put it on a local disk."
                )
            _apply(conn, location)


def check(location: Location) -> None:
    """Raise StoreError for a file that cannot be read without a migration, see `prepare`."""
    _check_path(location, create=False)
    with location.translated_errors(), closing(location.connect()) as conn:
        _check_header(conn, location)
        database.check_readable(pending(conn, location), str(location.path))


def _check_path(location: Location, *, create: bool) -> None:
    """Raise StoreError for a folder, and unless `create` for a missing file."""
    path = location.path
    if path.is_dir():
        near = [path / "store.db", *sorted(path.glob("*/store.db"))]
        store = next((file for file in near if file.is_file()), near[0])
        raise StoreError(f"{path} is a folder: name the file of a store, such as {store}.")
    if not (create or path.exists()):
        raise NotFound(f"There is no store at {path}: check the path.")


def pending(conn: sqlite3.Connection, location: Location) -> list[str]:
    """List the migrations that the file lacks. Raises StoreError if it has unknown ones."""
    table = "select 1 from sqlite_master where name = '_sqlite_migrations'"
    if conn.execute(table).fetchone() is None:
        return list(SCRIPTS)
    rows = conn.execute("select name from _sqlite_migrations where migration_set = ?", (SET,))
    applied = {row["name"] for row in rows}
    return database.missing_migrations(SCRIPTS, applied, str(location.path))


def migrations() -> Migrations:
    """Return the scripts as a set of `sqlite_utils` migrations."""
    from sqlite_utils.migrations import Migrations

    collection = Migrations(SET)
    for name, path in SCRIPTS.items():

        def apply(db: Database, /, path: Path = path) -> None:
            for statement in _statements(path.read_text(encoding="utf-8")):
                db.conn.execute(statement)

        collection(name=name)(apply)
    return collection


def _check_header(conn: sqlite3.Connection, location: Location) -> None:
    """Raise StoreError for a database that is not a store."""
    # In this order: another process may create the store between the two.
    (tables,) = conn.execute("select count(*) from sqlite_master").fetchone()
    (mark,) = conn.execute("pragma application_id").fetchone()
    if tables and mark != APPLICATION_ID:
        raise StoreError(
            f"{location.path} is a database but not an agentrl store: choose another path."
        )


def _apply(conn: sqlite3.Connection, location: Location) -> None:
    from sqlite_utils import Database

    conn.execute("begin immediate")  # processes that start together apply each script once
    try:
        if pending(conn, location):
            migrations().apply(Database(conn, execute_plugins=False))
            conn.execute(f"pragma application_id = {APPLICATION_ID}")
        conn.execute("commit")
    finally:
        if conn.in_transaction:
            conn.execute("rollback")


def _statements(script: str) -> Iterator[str]:
    """Split a script into statements: `executescript` would commit the caller's transaction."""
    statement = ""
    for line in script.splitlines(keepends=True):
        statement += line
        if sqlite3.complete_statement(statement):
            yield statement
            statement = ""


POLL_PAUSE = 1.0  # seconds
CLOSE = b"\0"


class ChangeNotifier:
    """Notifies other processes, and passes their notifications to `notify`."""

    def __init__(self, location: Location, file: StoreFile, notify: Callable[[int], None]) -> None:
        self._location, self._file = location, file
        self._notify = notify
        self._folder = folder(location.path)
        self._name = f"{os.getpid()}-{secrets.token_hex(4)}"
        self._socket = self._bind()
        self._sender = None if self._socket is None else _datagrams()
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._listen, name="store-notifier", daemon=True)
        self._thread.start()

    def notify_others(self, topics: int) -> None:
        """Notify other processes after a commit. Never blocks, never raises."""
        if self._sender is None:
            return
        message = bytes((topics,))
        try:
            names = os.listdir(self._folder)  # noqa: PTH208 - on the path of every commit
        except OSError:
            return
        for name in names:
            if name != self._name:
                self._send(message, f"{self._folder}/{name}")

    def close(self) -> None:
        self._closed.set()
        self._send(CLOSE, f"{self._folder}/{self._name}")
        self._thread.join()
        if self._socket is not None and self._sender is not None:
            self._socket.close()
            self._sender.close()
            with contextlib.suppress(OSError):
                (self._folder / self._name).unlink(missing_ok=True)
                self._folder.rmdir()  # succeeds for the last process

    def _bind(self) -> socket.socket | None:
        try:
            self._folder.mkdir(mode=0o700, exist_ok=True)
            if not _private(self._folder):
                return None
            listening = _datagrams()
        except (OSError, AttributeError):  # no folder, or no Unix sockets on this system
            return None
        try:
            listening.bind(str(self._folder / self._name))
        except OSError:
            listening.close()
            return None
        return listening

    def _send(self, message: bytes, path: str) -> None:
        if self._sender is None:
            return
        try:
            self._sender.sendto(message, path)
        except ConnectionRefusedError:  # its process died without closing
            with contextlib.suppress(OSError):
                Path(path).unlink()
        except OSError:  # it is gone, or its buffer is full and it will query anyway
            return

    def _listen(self) -> None:
        while not self._closed.is_set():
            try:
                self._file.check()
                with closing(self._location.connect(readonly=True)) as conn:
                    self._hear(conn)
            except Exception:  # noqa: BLE001 - waiting tasks must query, and get the error
                self._notify(ALL)
                self._closed.wait(POLL_PAUSE)

    def _hear(self, conn: sqlite3.Connection) -> None:
        seen_version, checked = _version(conn), time.monotonic()
        self._notify(ALL)  # for changes between a waiter's last query and this version
        while not self._closed.is_set():
            topics = self._receive()
            if time.monotonic() - checked >= POLL_PAUSE:
                self._file.check()
                version, checked = _version(conn), time.monotonic()
                if version != seen_version:
                    seen_version, topics = version, ALL
            if topics:
                self._notify(topics)

    def _receive(self) -> int:
        """Return the topics of all pending notifications; 0 after `POLL_PAUSE` seconds without
        one."""
        if self._socket is None:
            self._closed.wait(POLL_PAUSE)
            return 0
        self._socket.settimeout(POLL_PAUSE)
        topics = 0
        try:
            topics |= self._socket.recv(1)[0]
            self._socket.settimeout(0)
            while True:
                topics |= self._socket.recv(1)[0]
        except (TimeoutError, BlockingIOError):
            return topics


def folder(path: Path) -> Path:
    """Return the folder of a store file's sockets: equal for every path to the file, and short,
    because a socket's path is limited to about a hundred bytes."""
    file = path.stat()
    return Path(tempfile.gettempdir()) / f"agentrl-bells-{file.st_dev:x}-{file.st_ino:x}"


def _private(path: Path) -> bool:
    """Whether the path is a folder, not a link, that only this user may enter."""
    status = path.lstat()
    is_own = status.st_uid == os.geteuid()
    return is_own and stat.S_ISDIR(status.st_mode) and stat.S_IMODE(status.st_mode) == 0o700


def _datagrams() -> socket.socket:
    """Create a non-blocking socket. Receiving and sending use separate ones, as a timeout applies
    to the whole socket."""
    datagrams = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    datagrams.setblocking(False)
    return datagrams


def _version(conn: sqlite3.Connection) -> int:
    (version,) = conn.execute("pragma data_version").fetchone()
    return int(version)
