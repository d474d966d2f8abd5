"""PostgreSQL databases as stores: `postgresql://user:password@host:port/database`."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable
from pathlib import Path
from urllib.parse import parse_qsl, quote, unquote, urlencode, urlsplit, urlunsplit

from agentrl.errors import StoreError, install_command
from agentrl.store.base import Store
from agentrl.store.urls import StoreBackend


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


def split_password(url: str) -> tuple[str, str | None]:
    """Return the URL without its password, and the password if it has one."""
    parts = urlsplit(url)
    address, password = parts.netloc, None
    user, at, host = address.rpartition("@")
    name, colon, secret = user.partition(":")
    if at and colon:
        address, password = f"{name}@{host}", unquote(secret)
    options = parse_qsl(parts.query, keep_blank_values=True)
    kept = [(key, value) for key, value in options if key != "password"]
    if len(kept) < len(options):
        password = dict(options)["password"]
    query = urlencode(kept, quote_via=quote, safe="/") if len(kept) < len(options) else parts.query
    if address == parts.netloc and query == parts.query:
        return url, password
    public = urlunsplit((parts.scheme, address, parts.path, query, parts.fragment))
    if "://" not in public:
        public = public.replace(":", "://", 1)
    return public, password


def split_secret(url: str) -> tuple[str, dict[str, str]]:
    public, password = split_password(url)
    return public, {} if password is None else {"PGPASSWORD": password}


def backup(url: str, file: Path) -> None:
    """Copy the database by `pg_dump`."""
    address, secret = split_secret(url)
    command = ["pg_dump", "--format=custom", f"--file={file}", f"--dbname={address}"]
    try:
        subprocess.run(command, env=os.environ | secret, check=True)
    except (OSError, subprocess.CalledProcessError) as error:
        raise StoreError(f"The database was not copied: {error}.") from None


POSTGRES = StoreBackend(
    form="postgresql://host/database",
    open=open_database,
    split_secret=split_secret,
    backup=backup,
)
