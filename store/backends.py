"""The built-in backends: SQLite files, PostgreSQL databases and served stores.

A backend's driver is imported once a store of it is opened.
"""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from urllib.parse import parse_qsl, unquote, urlencode, urlsplit, urlunsplit

from agentrl.core.errors import StoreError, install_command
from agentrl.store.base import Store
from agentrl.store.urls import KEY_VARIABLE, StoreBackend, split_password


def open_file(
    url: str, *, create: bool, readonly: bool, clock: Callable[[], float] | None
) -> Store:
    from agentrl.store.sqlite import Location, SqliteStore

    return SqliteStore(Location.parse(url, readonly=readonly), create=create, clock=clock)


def copy_file(url: str, file: Path) -> None:
    """Copy the database, also while it is in use."""
    from agentrl.store.sqlite import Location

    Location.parse(url).backup(file)


def open_database(
    url: str, *, create: bool, readonly: bool, clock: Callable[[], float] | None
) -> Store:
    try:
        from agentrl.store.postgres.store import PostgresStore
    except ImportError as error:
        raise StoreError(
            f"postgresql:// needs psycopg ({error}): {install_command('postgres')}."
        ) from error
    return PostgresStore(url, create=create, readonly=readonly, clock=clock)


def password_variable(url: str) -> tuple[str, dict[str, str]]:
    public, password = split_password(url)
    return public, {} if password is None else {"PGPASSWORD": password}


def dump_database(url: str, file: Path) -> None:
    """Copy the database by `pg_dump`."""
    address, secret = password_variable(url)
    command = ["pg_dump", "--format=custom", f"--file={file}", f"--dbname={address}"]
    try:
        subprocess.run(command, env=os.environ | secret, check=True)
    except (OSError, subprocess.CalledProcessError) as error:
        raise StoreError(f"The database was not copied: {error}.") from None


def connect(url: str, *, create: bool, readonly: bool, clock: Callable[[], float] | None) -> Store:
    """Create a client. Sends no request yet; the server decides on `create` and `clock`."""
    from agentrl.store.http.client import connect

    return connect(url, readonly=readonly)


def key_variable(url: str) -> tuple[str, dict[str, str]]:
    parts = urlsplit(url)
    _, _, host = parts.netloc.rpartition("@")
    options = parse_qsl(parts.query, keep_blank_values=True)
    key = unquote(parts.username or parts.password or "") or dict(options).get("key")
    query = urlencode([(name, value) for name, value in options if name != "key"])
    public = urlunsplit((parts.scheme, host, parts.path, query, parts.fragment))
    return public, {KEY_VARIABLE: key} if key else {}


SQLITE = StoreBackend(form="sqlite:///path", open=open_file, backup=copy_file)
POSTGRES = StoreBackend(
    form="postgresql://host/database",
    open=open_database,
    split_secret=password_variable,
    backup=dump_database,
)
HTTP = StoreBackend(form="http://host:port", open=connect, split_secret=key_variable)
HTTPS = replace(HTTP, form="https://host:port")
