"""The store in a PostgreSQL database, opened by any process that reaches the server.

The verbs are those of SQLite; there each runs alone, here any number of processes run them at once,
at READ COMMITTED: a statement sees what was committed before it, and a statement that locks a row
sees its newest version. What a verb decides on, it locks first:

  * A rollout belongs to whoever holds its row. `claim` takes queued ones `for update skip locked`,
    `expire` overdue ones likewise; `finish` and `cancel` wait for theirs. So a rollout has one
    claimer and one end, and the attempt's lease and fence are judged after the wait.
  * The attempt's row guards its evidence: `add_transitions` and `add_spans` hold it, so a call is
    either before the end or late, and calls of one attempt find each other in the tree.
  * The run's row guards its epoch and step: `claim_groups`, `commit_step`, and what else carries an
    epoch, hold it; `open_run` changes it, so a fenced owner waits and then sees the new epoch.
  * The group's row guards its size and state: `enqueue` holds it while it grows.
  * A claim id and a request's id are locked as such: a repeat in another process waits for the
    first.

A verb takes its locks in the order rollout, attempt, run, group, and the rows that all processes
share (run, group, feed) are written when the transaction ends, in order of name. Where a group of
verbs, or an `enqueue` into a group that others are finishing, still meets another the other way
round, PostgreSQL ends one of the two and its writer runs it again.

Leases are judged by the server's clock, which is one, and not by those of the machines that open
the store.

The feed: numbers of events are given out under a lock that is held until the commit, the last of
all. They become visible in order, and who saw one has missed none before it.
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
        self, url: str, *, create: bool = True, clock: Callable[[], float] | None = None
    ) -> None:
        server = PostgresServer.parse(url)
        migrations.prepare(server, create=create)
        feed = Feed()
        try:
            session = PostgresSession(server, clock)
            listener = ChangeListener(server, feed.notify, lambda: session.pid)
        except psycopg.Error as error:
            raise server.to_store_error(error) from error
        super().__init__(
            server.url,
            session,
            PostgresReadPool(server),
            feed,
            notify=feed.notify,
            stop_listening=listener.close,
            shrink=server.vacuum,
        )
