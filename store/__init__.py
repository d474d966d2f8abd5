"""The store: tasks, what agents did with them, and what training made of it, in one database."""

from __future__ import annotations

from collections.abc import Callable

from agentrl.errors import Fenced, StoreError
from agentrl.store.base import Store
from agentrl.store.urls import scheme_of

__all__ = ["Fenced", "Store", "StoreError", "open_store"]


def open_store(
    url: str,
    *,
    create: bool = True,
    readonly: bool = False,
    clock: Callable[[], float] | None = None,
) -> Store:
    """Open the store at a URL, or at the path of an SQLite file.

    `sqlite:///relative.db`, `sqlite:////absolute.db`, with `?synchronous=full` to survive power
    cuts too; `postgresql://user:password@host:port/database`, with the options of libpq;
    `http(s)://[KEY@]host:port`, a store that `agentrl store serve` serves. A missing file, or the
    tables in an empty database, are created unless `create` is false, and an older schema is
    brought up to date. With `readonly` nothing is ever changed: verbs that write raise Forbidden,
    and a store that is missing, or too old to be read as it is, is an error. Leases are judged by
    this machine's clock where the store is a file, else by the server's; tests pass another
    `clock`, of unix seconds. Raises StoreError when the URL is not understood or what it names
    cannot be used.
    """
    scheme = scheme_of(url)
    if scheme in ("postgresql", "postgres"):
        try:
            from agentrl.store.postgres.store import PostgresStore
        except ImportError as error:
            raise StoreError(
                f"postgresql:// needs psycopg ({error}): pip install 'agentrl[postgres]'."
            ) from error
        return PostgresStore(url, create=create, readonly=readonly, clock=clock)
    if scheme in ("http", "https"):
        from agentrl.store.http.client import connect

        return connect(url, readonly=readonly)

    from agentrl.store.sqlite.connection import Location
    from agentrl.store.sqlite.store import SqliteStore

    location = Location.parse(url, readonly=readonly)
    return SqliteStore(location, create=create, clock=clock)
