"""The store in one SQLite file, which several processes of a machine may open."""

from __future__ import annotations

import time
from collections.abc import Callable

from agentrl.store.sql.feed import Feed
from agentrl.store.sql.store import SqlStore
from agentrl.store.sqlite import migrations
from agentrl.store.sqlite.connection import (
    Location,
    SqliteReadPool,
    SqliteSession,
    StoreFile,
    WalCheckpointer,
)
from agentrl.store.sqlite.notify import ChangeNotifier


class SqliteStore(SqlStore):
    def __init__(
        self, location: Location, *, create: bool = True, clock: Callable[[], float] | None = None
    ) -> None:
        if location.readonly:
            migrations.check(location)
        else:
            migrations.prepare(location, create=create)
        feed = Feed()
        file = StoreFile(location.path)
        notifier = ChangeNotifier(location, file, feed.notify)
        checkpoints = None if location.readonly else WalCheckpointer(location)

        def stop_listening() -> None:
            notifier.close()
            if checkpoints is not None:
                checkpoints.close()

        session = None
        if checkpoints is not None:
            session = SqliteSession(
                location, file, checkpoints.committed, notifier.notify_others, clock or time.time
            )
        read_pool = SqliteReadPool(location, file)
        super().__init__(
            location.url,
            session,
            read_pool,
            feed,
            stop_listening=stop_listening,
            shrink=location.vacuum,
        )
