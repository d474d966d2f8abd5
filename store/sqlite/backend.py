"""SQLite files as stores: `sqlite:///path`, or a path."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from agentrl.store.base import Store
from agentrl.store.sqlite.connection import Location
from agentrl.store.sqlite.store import SqliteStore
from agentrl.store.urls import StoreBackend


def open_file(
    url: str, *, create: bool, readonly: bool, clock: Callable[[], float] | None
) -> Store:
    return SqliteStore(Location.parse(url, readonly=readonly), create=create, clock=clock)


def backup(url: str, file: Path) -> None:
    Location.parse(url).backup(file)


SQLITE = StoreBackend(form="sqlite:///path", open=open_file, backup=backup)
