"""The store in a PostgreSQL database, opened by any process that reaches the server.

The verbs are those of SQLite. There they run one at a time; here several processes run them at
once, at READ COMMITTED: a statement sees what was committed before it, and a statement that locks a
row sees its newest version. A verb locks a row before it decides by it:

  * The rollout's row: `claim` takes queued ones `for update skip locked`, and so does the expiry of
    leases; `finish` and `cancel` wait for theirs. So a rollout is claimed once and ends once, and
    lease and fence of the attempt are judged after the wait.
  * The attempt's row: `add_transitions` and `add_spans` hold it. So a call comes either before the
    end or late, and calls of one attempt see each other in the tree.
  * The run's row, for epoch and step: `claim_groups`, `commit_step` and other verbs with an epoch
    hold it; `open_run` changes it, so a fenced owner waits and then sees the new epoch.
  * The group's row, for size and state: `enqueue` holds it while the group grows.
  * Claim ids and request ids have locks of their own: a repeat in another process waits for the
    first.
  * Data sets have one lock: what is added to a version comes before it is complete, or is refused.

A verb takes its locks in the order rollout, attempt, run, group; the rows that all processes share
(run, group, feed) are written when the transaction ends, in order of name. If there is a deadlock
all the same, PostgreSQL ends one of the transactions and its writer runs it again.

Leases are judged by the server's clock, not by those of the machines that open the store.

Numbers of events are given out under a lock that is taken last and held until the commit: they
become visible in order, so whoever saw one has missed none before it.
"""

from __future__ import annotations

from collections.abc import Callable

import psycopg

from agentrl.store.feed import Feed
from agentrl.store.postgres import migrations
from agentrl.store.postgres.connection import PostgresServer
from agentrl.store.postgres.notify import ChangeListener
from agentrl.store.postgres.session import PostgresReadPool, PostgresSession
from agentrl.store.sqlstore import SqlStore


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
            notify=lambda topics, _: feed.notify(topics),
            stop_listening=listener.close,
            shrink=server.vacuum,
        )
