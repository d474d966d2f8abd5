"""Migrates a store file to the schema of this version, under one lock, or refuses it.

The migrations are the files `sql/migrations/*.sql` in order of name; a published one is never
changed, and each has a counterpart with the same name in `sql/postgres/migrations`. Applied ones
are recorded in the table of `sqlite_utils.migrations`, so `sqlite-utils migrate` works too; the
library is imported only if a migration must be applied.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING

from agentrl.errors import NotFound, StoreError
from agentrl.store.sql import database
from agentrl.store.sqlite.connection import LOCK_PATIENCE, Location, execute_when_free

if TYPE_CHECKING:
    from sqlite_utils import Database
    from sqlite_utils.migrations import Migrations

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
        found = next((file for file in near if file.is_file()), near[0])
        raise StoreError(f"{path} is a folder: name the file of a store, such as {found}.")
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

    known = Migrations(SET)
    for name, path in SCRIPTS.items():

        def apply(db: Database, /, path: Path = path) -> None:
            for statement in _statements(path.read_text(encoding="utf-8")):
                db.conn.execute(statement)

        known(name=name)(apply)
    return known


def _check_header(conn: sqlite3.Connection, location: Location) -> None:
    """Raise StoreError for a database that is not a store."""
    # In this order: another process may create the store between the two.
    (tables,) = conn.execute("select count(*) from sqlite_master").fetchone()
    (mark,) = conn.execute("pragma application_id").fetchone()
    if tables and mark != APPLICATION_ID:
        raise StoreError(
            f"{location.path} is a database but no agentrl store: choose another path."
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
