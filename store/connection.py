"""SQLite connections: where the file is, how it is opened, and what its errors mean to a user."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import parse_qsl

from agentrl.errors import Invalid, StoreError, Unavailable

# What a value raises that no column takes: integers of more than 64 bits, text that is no Unicode.
UNFIT = (
    OverflowError,
    UnicodeError,
    sqlite3.DataError,
    sqlite3.IntegrityError,
    sqlite3.InterfaceError,
)
BUSY = 60.0  # seconds to wait for the locks of other processes, which hold them for milliseconds
CHECKPOINT = 16_000  # pages of write-ahead log before the writer itself copies them back


@dataclass(frozen=True, slots=True)
class Location:
    """A store file and its options, from `sqlite:///path?synchronous=full` or a bare path.

    `normal` survives the death of any process; `full` also a power cut, at one disk sync a commit.
    """

    path: Path
    synchronous: str = "normal"

    @classmethod
    def parse(cls, url: str) -> Location:
        if "://" not in url:
            return cls(_file(url, url))
        base, _, query = url.partition("?")
        path = base.removeprefix("sqlite:///") if base.startswith("sqlite:///") else ""
        options = dict(parse_qsl(query, keep_blank_values=True))
        synchronous = options.pop("synchronous", "normal")
        if options or synchronous not in ("normal", "full"):
            raise StoreError(
                f"Store URL {url!r} has an unknown option: use ?synchronous=normal or "
                "?synchronous=full."
            )
        return cls(_file(path, url), synchronous)

    @property
    def url(self) -> str:
        option = "" if self.synchronous == "normal" else f"?synchronous={self.synchronous}"
        return f"sqlite:///{self.path}{option}"

    def connect(self, *, readonly: bool = False, timeout: float = BUSY) -> sqlite3.Connection:
        """A connection in autocommit mode: every transaction is begun by hand."""
        conn = sqlite3.connect(
            self.path,
            timeout=timeout,
            isolation_level=None,
            check_same_thread=False,  # each is used by one thread, but closed by another
            cached_statements=256,
        )
        conn.row_factory = sqlite3.Row
        conn.execute(f"pragma synchronous = {self.synchronous}")
        conn.execute(f"pragma wal_autocheckpoint = {CHECKPOINT}")
        if readonly:
            conn.execute("pragma query_only = on")
        return conn

    def vacuum(self) -> None:
        """Writes the file anew, without free pages. Other writers wait for it, readers do not."""
        with self.explained(), closing(self.connect()) as conn:
            conn.execute("vacuum")
            conn.execute("pragma wal_checkpoint(truncate)")

    @contextmanager
    def explained(self) -> Iterator[None]:
        """Turns SQLite's errors into one sentence that names the file."""
        try:
            yield
        except (sqlite3.Error, *UNFIT) as error:
            raise explained(self.path, error) from error


def explained(path: Path, error: Exception) -> Exception:
    """SQLite's errors as ours; any other as it is."""
    if isinstance(error, UNFIT):
        return Invalid(f"A value cannot be stored: {error}.")
    if isinstance(error, sqlite3.Error):
        return Unavailable(explain(path, error))
    return error


def explain(path: Path, error: sqlite3.Error) -> str:
    """What happened to the file and what to do."""
    advice = {
        "SQLITE_NOTADB": "it is not an SQLite database; choose another path",
        "SQLITE_CORRUPT": "the file is damaged; restore a copy or choose another path",
        "SQLITE_CANTOPEN": "it cannot be opened; check that the folder exists and is writable",
        "SQLITE_READONLY": "it cannot be written; check its permissions",
        "SQLITE_PERM": "it cannot be written; check its permissions",
        "SQLITE_FULL": "the disk is full; free some space and run the same command again",
        "SQLITE_IOERR": "the disk refuses to read or write; check it, and the space on it",
        "SQLITE_BUSY": "another process holds its write lock; end that process",
    }
    name = getattr(error, "sqlite_errorname", "") or ""
    known = next((text for code, text in advice.items() if name.startswith(code)), str(error))
    return f"Store {path}: {known}."


def _file(path: str, url: str) -> Path:
    if not path or path == ":memory:":
        raise StoreError(
            f"Store URL {url!r} names no file: use sqlite:///runs/store.db, or "
            "sqlite:////absolute/store.db."
        )
    return Path(path).absolute()
