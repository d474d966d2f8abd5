"""One SQL question to a store's database, which cannot change it.

Always true: the connection is opened for this question alone, by the database's own means
read-only, and closed after it. Nothing of the store's protocol is involved, so it works beside
running processes, on a copy, and on a schema that this version would have to migrate first.
"""

from __future__ import annotations

import re
import sqlite3
from collections.abc import Generator, Sequence
from contextlib import closing
from itertools import islice
from typing import TYPE_CHECKING, Any, NamedTuple, cast

from agentrl.errors import Invalid, NotFound, Unavailable
from agentrl.store import values
from agentrl.store.sqlite.connection import Location, describe_error

if TYPE_CHECKING:
    import psycopg

SECONDS = 60  # after which PostgreSQL gives up
SHOWN = 32  # bytes of a blob that are shown; digests are shorter, tokens are longer
READING = {"select", "with", "values", "table", "show", "explain"}
ALLOWED = {
    sqlite3.SQLITE_SELECT,
    sqlite3.SQLITE_READ,
    sqlite3.SQLITE_FUNCTION,
    sqlite3.SQLITE_RECURSIVE,
}
PRAGMAS = {"table_list", "table_info", "table_xinfo", "index_list", "index_info"}
BROKEN = {
    sqlite3.SQLITE_NOTADB,
    sqlite3.SQLITE_CORRUPT,
    sqlite3.SQLITE_CANTOPEN,
    sqlite3.SQLITE_IOERR,
    sqlite3.SQLITE_BUSY,
}
DENIED = {"not authorized", "authorization denied"}
REFUSED = "A query only reads: start it with select or with; nothing was changed."

Value = str | int | float | None


class Answer(NamedTuple):
    columns: list[str]
    rows: list[list[Value]]
    more: bool  # there are more rows than were asked for


def ask(url: str, sql: str, *, limit: int) -> Answer:
    """At most `limit` rows of one statement. `tokens(blob)` and `logprobs(blob)` are JSON lists in
    SQLite; other blobs are shown in hex or, if long, as their length.

    Raises Invalid for a statement that writes or is wrong, and where the URL is that of a server;
    NotFound and Unavailable for a database that is missing or cannot be read."""
    if url.startswith(("http://", "https://")):
        raise Invalid(
            "A store server answers no SQL: ask on the machine of its database, with "
            "--store sqlite:///path or --store postgresql://host/name."
        )
    if url.startswith(("postgresql://", "postgres://")):
        return _ask_postgres(url, sql, limit)
    return _ask_sqlite(Location.parse(url), sql, limit)


def shown(value: Any) -> Value:
    """A value of any column as text or number."""
    if isinstance(value, bytes | memoryview):
        data = bytes(value)
        return data.hex() if len(data) <= SHOWN else f"<{len(data)} bytes>"
    return value if isinstance(value, str | int | float | None) else str(value)


# -- SQLite ----------------------------------------------------------------------------------------


def _ask_sqlite(location: Location, sql: str, limit: int) -> Answer:
    if not location.path.exists():
        raise NotFound(f"There is no store at {location.path}: check the path.")
    with closing(_connect(location)) as conn:
        try:
            cursor = conn.execute(sql)
            columns = [column[0] for column in cursor.description or ()]
            found = cursor.fetchmany(limit + 1)
        except sqlite3.Warning as error:  # Python 3.11 and earlier, for several statements
            raise Invalid("A query is one statement.") from error
        except sqlite3.Error as error:
            raise _sqlite_error(location, error) from error
    return _answer(columns, found, limit)


def _connect(location: Location) -> sqlite3.Connection:
    try:
        conn = sqlite3.connect(f"{location.path.as_uri()}?mode=ro", uri=True, isolation_level=None)
        conn.execute("pragma query_only = on")
    except sqlite3.Error as error:
        raise Unavailable(describe_error(location.path, error)) from error
    conn.create_function("tokens", 1, _list("i"), deterministic=True)
    conn.create_function("logprobs", 1, _list("f"), deterministic=True)
    conn.set_authorizer(_authorize)
    return conn


def _list(typecode: str) -> Any:
    def function(data: bytes | None) -> str | None:
        if data is None:
            return None
        return values.to_json(values.from_blob(typecode, data).tolist(), "A blob")

    return function


def _authorize(action: int, name: str | None, argument: str | None, *_: object) -> int:
    """`mode=ro` protects this file; this also refuses others (attach) and settings (pragma)."""
    if action == sqlite3.SQLITE_FUNCTION and argument == "load_extension":
        return sqlite3.SQLITE_DENY
    if action in ALLOWED or (action == sqlite3.SQLITE_PRAGMA and name in PRAGMAS):
        return sqlite3.SQLITE_OK
    return sqlite3.SQLITE_DENY


def _sqlite_error(location: Location, error: sqlite3.Error) -> Invalid | Unavailable:
    text, code = str(error), getattr(error, "sqlite_errorcode", None)
    if code is not None and code & 0xFF in BROKEN:
        return Unavailable(describe_error(location.path, error))
    if "one statement" in text:
        return Invalid("A query is one statement.")
    if "user-defined function" in text:
        return Invalid("tokens() and logprobs() take a column of them, as it is stored.")
    if text in DENIED:
        return Invalid(REFUSED)
    return Invalid(f"The query is wrong: {text}.")


# -- PostgreSQL ------------------------------------------------------------------------------------


def _ask_postgres(url: str, sql: str, limit: int) -> Answer:
    try:
        import psycopg
    except ImportError as error:
        raise Unavailable("PostgreSQL needs `pip install 'agentrl[postgres]'`.") from error
    first = re.search(r"[a-z]+", re.sub(r"--[^\n]*|/\*.*?\*/", " ", sql, flags=re.DOTALL).lower())
    if first is None or first[0] not in READING:
        raise Invalid(REFUSED)  # a read-only transaction still copies to files, and can be left
    try:
        with psycopg.connect(url) as conn, conn.cursor() as cursor:
            conn.read_only = True
            cursor.execute(f"set local statement_timeout = '{SECONDS}s'")
            # Row by row, so that no more is sent than is shown; several statements are refused by
            # the server. The rest of the answer is cancelled.
            stream = cast("Generator[tuple[Any, ...]]", cursor.stream(sql.encode()))
            with closing(stream) as streamed:
                found = list(islice(streamed, limit + 1))
                described = cursor.description
            if not found:  # then a stream does not say its columns
                described = cursor.execute(sql.encode(), prepare=True).description
            columns = [column.name for column in described or ()]
            conn.rollback()
    except psycopg.Error as error:
        raise _postgres_error(error) from error
    return _answer(columns, found, limit)


def _postgres_error(error: psycopg.Error) -> Invalid | Unavailable:
    from psycopg import errors

    text = str(error).strip().split("\n")[0]
    if isinstance(error, errors.ReadOnlySqlTransaction):
        return Invalid(REFUSED)
    if isinstance(error, errors.QueryCanceled):
        return Invalid(f"The query took longer than {SECONDS} s: narrow it.")
    if error.sqlstate is None or error.sqlstate.startswith(("08", "28", "3D", "53", "57")):
        return Unavailable(f"The PostgreSQL server cannot be asked: {text}.")
    return Invalid(f"The query is wrong: {text}.")


# -- parts -----------------------------------------------------------------------------------------


def _answer(columns: list[str], found: Sequence[Sequence[Any]], limit: int) -> Answer:
    if not columns:
        raise Invalid(REFUSED)
    kept = [[shown(value) for value in row] for row in found[:limit]]
    return Answer(columns, kept, len(found) > limit)
