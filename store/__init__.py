"""The store: tasks, what agents did with them, and what training made of it, in one database."""

from __future__ import annotations

from collections.abc import Callable

from agentrl.errors import Fenced, StoreError
from agentrl.store.base import Store
from agentrl.store.urls import scheme_of

__all__ = ["Fenced", "Store", "StoreError", "open_store"]


def open_store(url: str, *, create: bool = True, clock: Callable[[], float] | None = None) -> Store:
    """Open the store at a URL, or at the path of an SQLite file.

    `sqlite:///relative.db`, `sqlite:////absolute.db`, with `?synchronous=full` to survive power
    cuts too; `postgresql://user:password@host:port/database`, with the options of libpq;
    `http(s)://[KEY@]host:port`, the store that `agentrl store serve` gives to others. A missing
    file, or the tables in an empty database, are made unless `create` is false. Raises StoreError
    when the URL is not understood or what it names cannot be used. Leases
    are judged by this machine's clock where the store is a file, else by that of its server; tests
    give another `clock`, of unix seconds.
    """
    scheme = scheme_of(url)
    if scheme in ("postgresql", "postgres"):
        return _postgres(url, create=create, clock=clock)
    if scheme in ("http", "https"):
        return _http(url)

    from agentrl.store.sqlite.connection import Location
    from agentrl.store.sqlite.store import SqliteStore

    return SqliteStore(Location.parse(url), create=create, clock=clock)


def _postgres(url: str, *, create: bool, clock: Callable[[], float] | None) -> Store:
    try:
        from agentrl.store.postgres.store import PostgresStore
    except ImportError as error:
        raise StoreError(
            f"postgresql:// needs psycopg ({error}): pip install 'agentrl[postgres]'."
        ) from error
    return PostgresStore(url, create=create, clock=clock)


def _http(url: str) -> Store:
    from agentrl.store.http.client import connect

    return connect(url)
