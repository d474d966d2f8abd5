"""The store: one database with runs, rollouts, traces, rewards and training steps."""

from __future__ import annotations

from collections.abc import Callable

from agentrl.core.errors import Fenced, StoreError
from agentrl.store.base import Store
from agentrl.store.urls import backend_of

__all__ = ["Fenced", "Store", "StoreError", "open_store", "unknown_rollout"]


def open_store(
    url: str,
    *,
    create: bool = True,
    readonly: bool = False,
    clock: Callable[[], float] | None = None,
) -> Store:
    """Open the store at a URL, or at the path of an SQLite file.

    `sqlite:///relative.db`, `sqlite:////absolute.db`, with `?synchronous=full` to survive power
    cuts too; `postgresql://user:password@host:port/database`, with libpq's options;
    `http(s)://[KEY@]host:port`, served by `agentrl store serve`. Creates a missing file, or the
    tables of an empty database, unless `create` is false, and migrates an older schema. With
    `readonly` nothing is ever changed: verbs that write raise Forbidden, and a store that is
    missing or has too old a schema is an error. Leases use this machine's clock for a file, else
    the server's; tests pass another `clock` of unix seconds. Raises StoreError if the URL is
    invalid or the store cannot be opened."""
    return backend_of(url).open(url, create=create, readonly=readonly, clock=clock)


async def unknown_rollout(store: Store, id: str) -> str:
    """An error message for an unknown rollout, with a hint if the id is the name of a run."""
    run = id.partition("/")[0]
    newest = await store.search(run, limit=1) if await store.run(run) else None
    if newest is None or not newest.rows:
        return f"there is no rollout {id!r} in {store.url}; ids look like run/train/g0000000/0000"
    what = f"{id!r} is a run, not a rollout" if id == run else f"there is no rollout {id!r}"
    return (
        f"{what}: its newest one is {newest.rows[0].id}, and agentrl view --run {run} has them all"
    )
