"""The store in one SQLite file, opened by every process on the machine."""

from __future__ import annotations

import time
from collections.abc import Callable

from agentrl.store.feed import Feed
from agentrl.store.sqlite import migrations
from agentrl.store.sqlite.connection import Location, SqliteSession, SqliteSnapshots, StoreFile
from agentrl.store.sqlite.notify import Bell
from agentrl.store.sqlite.wal_checkpoint import Checkpoints
from agentrl.store.sqlstore import SqlStore


class SqliteStore(SqlStore):
    def __init__(
        self, location: Location, *, create: bool = True, clock: Callable[[], float] | None = None
    ) -> None:
        migrations.prepare(location, create=create)
        feed = Feed()
        file = StoreFile(location.path)
        bell = Bell(location, file, feed.ring)
        checkpoints = Checkpoints(location)

        def ring(topics: int) -> None:
            feed.ring(topics)
            bell.ring_others(topics)

        def hang_up() -> None:
            bell.close()
            checkpoints.close()

        session = SqliteSession(location, file, checkpoints.committed, clock or time.time)
        snapshots = SqliteSnapshots(location, file)
        super().__init__(
            location.url,
            session,
            snapshots,
            feed,
            ring=ring,
            hang_up=hang_up,
            shrink=location.vacuum,
        )
