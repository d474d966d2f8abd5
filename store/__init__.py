"""The truth: what was asked for, what happened, what was learned from it."""

from __future__ import annotations

import time
from collections.abc import Callable

from agentrl.errors import Fenced, StoreError
from agentrl.store.base import Store

__all__ = ["Fenced", "Store", "StoreError", "open_store"]

SCHEMES = ("sqlite", "http", "https")


def open_store(url: str, *, create: bool = True, clock: Callable[[], float] = time.time) -> Store:
    """Open the store at a URL, or at the path of an SQLite file.

    `sqlite:///relative.db`, `sqlite:////absolute.db`, with `?synchronous=full` to survive power
    cuts too. A missing file is made unless `create` is false. `http(s)://[KEY@]host:port` is the
    store that `agentrl store serve` gives to others. Raises StoreError when the URL is not
    understood or what it names cannot be used. `clock` gives unix seconds; a store over HTTP has
    its server's.
    """
    scheme, separator, _ = url.partition("://")
    if separator and scheme not in SCHEMES:
        raise StoreError(
            f"Store URL {url!r}: {scheme}:// is not supported, use sqlite:///path or http://host."
        )
    if separator and scheme in ("http", "https"):
        from agentrl.store.http.client import connect

        return connect(url)

    from agentrl.store.connection import Location
    from agentrl.store.sqlite import SqliteStore

    return SqliteStore(Location.parse(url), create=create, clock=clock)
