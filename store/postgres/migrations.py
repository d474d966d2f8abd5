"""Migrates a PostgreSQL database to the schema of this version, under one lock, or refuses it.

The scripts `sql/postgres/migrations/*.sql` have the same names and meaning as those of SQLite. The
table `_agentrl_migrations` lists applied ones.
"""

from __future__ import annotations

import psycopg
from psycopg.rows import DictRow

from agentrl.errors import NotFound, StoreError
from agentrl.store.postgres.connection import PostgresServer
from agentrl.store.sql import database

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
    found = {row["tablename"] for row in conn.execute(tables)}
    if "_agentrl_migrations" not in found:
        if found:
            raise StoreError(
                f"{server.url} is a database but no agentrl store: choose an empty one, or an "
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
