"""The store in a PostgreSQL database, for any process that reaches the server.

The verbs are those of SQLite, where they run one at a time. Here several processes run them
concurrently, at READ COMMITTED: a statement sees all earlier commits, and a statement that locks a
row sees its newest version. A verb locks the rows that its decisions depend on:

  * The rollout's row: `claim` and the expiry of leases lock rows `for update skip locked`; `finish`
    and `cancel` wait for theirs. So a rollout is claimed once and ends once, and lease and fence of
    the attempt are checked after the wait.
  * The attempt's row: locked by `add_transitions` and `add_spans`. So a call is stored either
    before the attempt's end or late, and calls of one attempt see each other in the tree.
  * The run's row, for epoch and step: locked by `claim_groups`, `commit_step` and other verbs with
    an epoch; `open_run` changes it, so a fenced owner waits and then sees the new epoch.
  * The group's row, for size and state: locked by `enqueue` while the group grows.
  * Claim ids and request ids have separate locks: a repeat in another process waits for the first
    call.
  * Data sets have one lock: an addition to a version precedes its completion, or is refused.

A verb takes its locks in the order rollout, attempt, run, group; the rows that all processes share
(run, group, feed) are written at the end of the transaction, in order of name. If a deadlock occurs
nevertheless, PostgreSQL aborts one of the transactions and its writer runs it again.

Leases use the server's clock, not those of the machines that open the store.

Event numbers are assigned under a lock that is taken last and held until the commit: they become
visible in order, so a reader that has seen one has missed none before it.
"""

from __future__ import annotations

from collections.abc import Callable

import psycopg

from agentrl.store.postgres import migrations
from agentrl.store.postgres.connection import PostgresServer
from agentrl.store.postgres.notify import ChangeListener
from agentrl.store.postgres.session import PostgresReadPool, PostgresSession
from agentrl.store.sql.feed import Feed
from agentrl.store.sql.store import SqlStore


class PostgresStore(SqlStore):
    def __init__(
        self,
        url: str,
        *,
        create: bool = True,
        readonly: bool = False,
        clock: Callable[[], float] | None = None,
    ) -> None:
        server = PostgresServer.parse(url, readonly=readonly)
        migrations.prepare(server, create=create)
        feed = Feed()
        try:
            session = None if readonly else PostgresSession(server, clock)
            own = (lambda: 0) if session is None else (lambda: session.pid)
            listener = ChangeListener(server, feed.notify, own)
        except psycopg.Error as error:
            raise server.to_store_error(error) from error
        super().__init__(
            server.url,
            session,
            PostgresReadPool(server),
            feed,
            stop_listening=listener.close,
            shrink=server.vacuum,
        )
