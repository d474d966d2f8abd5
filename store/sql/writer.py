"""The writer of an open store: a thread that commits the verbs of this process in groups.

The one invariant: **a posted verb waits in the queue, is in the group that the thread executes, or
is answered; and it is answered only after the transaction with its changes is committed.** The rest
follows:

  * Only the thread uses the session. A group is all verbs that wait, in the order of posting, up to
  `MAX_GROUP_VERBS`; calls of a `Bulk` verb are merged at the group's end.
  * Nothing enters the queue after the end of the thread: `post`, `close` and a failure decide under
    one lock. So no verb waits for ever, and `close` returns after the last answer.
  * A refused verb stores nothing and does not affect the others: the transaction is rolled back and
    run again, each verb in a savepoint. A verb may therefore run several times, and must have no
    effect outside the transaction.
  * An unexpected error ends the writer and is raised for all waiting and later verbs.
  * After a time in which writes were impossible (a vacuum, a failover) every lease is extended.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import islice
from queue import Empty, SimpleQueue
from typing import Any, Generic, TypeVar

import msgspec

from agentrl.core.errors import StoreError, Unavailable
from agentrl.core.types import Counts, Purpose
from agentrl.store.sql.database import (
    ANY,
    GROUPS,
    QUEUE,
    Session,
    WritingConnection,
    load_sql,
    resolve,
)
from agentrl.store.sql.tree import AttemptCalls, KnownAttempts

SQL = load_sql("feed")
EXTEND_LEASES = load_sql("rollouts")["resume"]
STALL = 5.0  # seconds: a heartbeat that waits longer for its transaction may be too late
LEASE_GRACE = 10.0  # seconds by which leases are extended after a stall, for waiting heartbeats
MAX_GROUP_VERBS = (
    256  # verbs per transaction: bounds the time that other processes wait for the lock
)
# Minimum seconds between notifications: of work, and of other changes.
URGENT_INTERVAL, NOTIFY_INTERVAL = 0.002, 0.05
COUNTERS = dict.fromkeys(Counts.__struct_fields__, 0)
T = TypeVar("T")
Item = TypeVar("Item")


@dataclass(slots=True)
class Transaction:
    """The transaction of a group of verbs: connection, time, and a record of their changes. The
    record is written once, at the end: this locks the rows that all writers share for the shortest
    time, in the same order."""

    conn: WritingConnection
    time: float | Callable[[], float]  # as returned by `Session.begin`
    known: KnownAttempts
    seen: dict[str, AttemptCalls] = field(default_factory=dict)  # by attempt, for `known`
    topics: int = 0
    leases: Any = None  # summary of leases, set by the first query of the queue
    events: list[tuple[str, str, str]] = field(default_factory=list)
    counts: dict[str, Counter[str]] = field(default_factory=lambda: defaultdict(Counter))
    ended: Counter[tuple[str, str]] = field(default_factory=Counter)  # rollouts by run and group

    @property
    def now(self) -> float:
        """Unix seconds."""
        return self.time() if callable(self.time) else self.time

    @property
    def time_if_known(self) -> float | None:
        """The time; None if that would wait for the database."""
        return None if callable(self.time) else self.time

    def add_event(self, run: str, kind: str, id: str, topics: int = 0) -> None:
        """Add an event to the change feed, and wake waiters of the `topics`."""
        self.events.append((run, kind, id))
        self.topics |= ANY | topics

    def add_counts(self, run: str, **change: int) -> None:
        """Add to the counters of a run, named as the fields of `Counts`."""
        counts = self.counts[run]
        for name, more in change.items():
            counts[name] += more

    def extend_leases(self) -> None:
        """Extend every lease to at least `LEASE_GRACE`, as it could not be renewed. This revives
        expired leases whose rollouts were not claimed again."""
        self.conn.execute(EXTEND_LEASES, {"until": self.now + LEASE_GRACE, "grace": LEASE_GRACE})

    def add(self, other: Transaction) -> None:
        """Add the changes of another verb."""
        self.topics |= other.topics
        self.events += other.events
        self.ended += other.ended
        self.seen |= other.seen
        for run, change in other.counts.items():
            self.add_counts(run, **change)

    def settle_groups(self) -> None:
        """Write counters and ended rollouts: runs first, then groups, each sorted by name."""
        self._write_counts()
        shrunk = [
            (run, group, self.conn.ask(SQL["shrink_group"], {"n": n, "group": group}))
            for (run, group), n in sorted(self.ended.items())
        ]
        for run, group, result in shrunk:
            row = result.fetchone()
            if row["state"] == "settled":
                if row["purpose"] == Purpose.TRAIN:
                    self.add_counts(run, groups_open=-1, groups_settled=1)
                self.add_event(run, "group", group, GROUPS)
        self.ended.clear()
        self._write_counts()

    def write(self) -> None:
        """Write all changes, the feed last."""
        self.settle_groups()
        if self.events:
            self.conn.execute(SQL["add_events"], (msgspec.json.encode(self.events).decode(),))

    def _write_counts(self) -> None:
        for run, change in sorted(self.counts.items()):
            self.conn.execute(SQL["count"], {**COUNTERS, **change, "run": run})
        self.counts.clear()


WriteVerb = Callable[[Transaction], T]


@dataclass(frozen=True, slots=True)
class Bulk(Generic[Item, T]):
    """A verb over a list with a result for each item. The writer merges the calls of a group, which
    are concurrent, so their order is arbitrary."""

    change: Callable[[Transaction, Sequence[Item]], list[T]]
    items: Sequence[Item]

    def __call__(self, tx: Transaction) -> list[T]:
        return self.change(tx, self.items)


@dataclass(slots=True, eq=False)
class _Job:
    verb: Any  # a WriteVerb
    future: asyncio.Future[Any]
    result: Any = None
    error: Exception | None = None


@dataclass(slots=True)
class _Notices:
    """Topics of which other processes were not notified yet.

    Each notification wakes every other process, whether it has waiters or not: with eight processes
    that write calls one by one this cost more than writing. So notifications are merged for a short
    time; the first after a pause is sent at once."""

    owed: int = 0
    notified: float = -NOTIFY_INTERVAL  # time of the last notification, monotonic clock

    def wait(self, topics: int = 0) -> float:
        """Return the seconds until others must be notified of `topics` and of pending topics."""
        pause = URGENT_INTERVAL if (self.owed | topics) & (QUEUE | GROUPS) else NOTIFY_INTERVAL
        return max(0.0, self.notified + pause - time.monotonic())

    def due(self, topics: int) -> int:
        """Return the topics to notify others of with a commit of `topics`; 0 if it is too early."""
        return 0 if self.wait(topics) > 0.0 else self.owed | topics

    def sent(self, due: int, topics: int) -> None:
        """Record a commit of `topics`, with a notification of `due` if that is not 0."""
        self.owed = 0 if due else self.owed | topics
        self.notified = time.monotonic() if due else self.notified


class Writer:
    """Group commit. Calls `notify` with the topics of every commit with changes, for waiters of
    this process; the session notifies other processes."""

    def __init__(self, name: str, session: Session, notify: Callable[[int], None]) -> None:
        self._name, self._session, self._notify = name, session, notify
        self._lock = threading.Lock()  # held to post, to close and to fail
        self._jobs: SimpleQueue[_Job | None] = SimpleQueue()  # None, of `close`, is the last
        self._closed = False
        self._failure: BaseException | None = None  # the error that ended the writer
        self._stalled = False  # the previous transaction took long
        self._attempt_cache = KnownAttempts()
        self._notices = _Notices()
        self._thread = threading.Thread(target=self._serve, name="store-writer", daemon=True)
        self._thread.start()

    def post(self, verb: WriteVerb[T]) -> asyncio.Future[T]:
        """Queue a verb, from any running loop. The future resolves, on that loop, after the commit.

        The verb of a caller that is cancelled while it waits is committed all the same, without a
        report. The gateway relies on this (`ActiveAttempt.undelivered`)."""
        future: asyncio.Future[T] = asyncio.get_running_loop().create_future()
        with self._lock:
            if self._closed:
                raise StoreError(f"Store {self._name} is closed.")
            if self._failure is not None:
                raise self._ended(self._failure)
            self._jobs.put(_Job(verb, future))
        return future

    def close(self) -> None:
        """Block until all posted verbs are committed."""
        with self._lock:
            self._closed = True
            self._jobs.put(None)
        self._thread.join()

    # -- the thread --------------------------------------------------------------------------------

    def _serve(self) -> None:
        group: list[_Job] = []
        try:
            last = False
            while not last:
                group, last = self._next_group()
                self._execute(group, last)
        except BaseException as error:  # noqa: BLE001 - otherwise callers would wait
            with self._lock:
                self._failure = error
                unanswered = [*group, *self._queued()]
            resolve((job.future, self._ended(error)) for job in unanswered if job is not None)
        finally:
            self._session.close()  # ends a transaction that failed, which blocks other processes

    def _next_group(self) -> tuple[list[_Job], bool]:
        """Wait for verbs, but no longer than until others must be notified. Return the queued ones,
        and whether the store is closed and they are the last."""
        taken: list[_Job | None] = []
        with suppress(Empty):
            wait = self._notices.wait() if self._notices.owed else None
            taken.append(self._jobs.get(timeout=wait))
            taken += islice(self._queued(), MAX_GROUP_VERBS - 1)
        return [job for job in taken if job is not None], None in taken

    def _queued(self) -> Iterator[_Job | None]:
        with suppress(Empty):
            while True:
                yield self._jobs.get_nowait()

    def _execute(self, group: list[_Job], last: bool) -> None:
        """Commit a group of verbs, answer them, and notify others if it is time."""
        topics = self._commit(group) if group else 0
        resolve((job.future, job.error or job.result) for job in group)
        if self._notices.owed and (last or self._notices.wait() <= 0.0):
            self._notify_other_processes()
        if topics:
            self._notify(topics)

    def _notify_other_processes(self) -> None:
        """Notify other processes outside a transaction with changes."""
        owed = self._notices.owed
        self._notices.sent(owed, 0)
        with suppress(*self._session.errors):  # they also poll occasionally
            self._session.notify_others(owed)

    def _ended(self, error: BaseException) -> Unavailable:
        ended = Unavailable(
            f"Store {self._name}: its writer hit an unexpected error ({error!r}) and has "
            "ended: open the store again."
        )
        ended.__cause__ = error
        return ended

    # -- one transaction ---------------------------------------------------------------------------

    def _commit(self, jobs: list[_Job]) -> int:
        """Execute one transaction and return its topics. Errors are stored in the jobs.

        After any error of a transaction that has begun, each verb is run alone, in another one: the
        error may be caused by a single verb, or by an outdated cache entry of an attempt
        (`check_known` in `traces.sql`)."""
        since = time.monotonic()
        while True:
            try:
                begun = self._session.begin()  # waits for locks; if it fails, no verb is to blame
                try:
                    return self._transact(jobs, self._run, begun, since)
                except Exception:  # noqa: BLE001 - raised again below, only for its verb
                    self._session.rollback()
                    begun = self._session.begin()
                    return self._transact(jobs, self._run_each_alone, begun, since)
            except self._session.errors as error:
                self._session.rollback()
                if self._session.can_retry(error, since):
                    continue
                for job in jobs:
                    job.error = job.error or self._session.to_store_error(error)
                return 0

    def _transact(
        self,
        jobs: list[_Job],
        run: Callable[[list[_Job], Transaction], None],
        begun: float | Callable[[], float],
        since: float,
    ) -> int:
        """Run verbs in a transaction that has begun, and commit it. begun: its time, as returned by
        `begin`; since: when its group was taken, by the monotonic clock."""
        group = Transaction(self._session.conn, begun, self._attempt_cache)
        if self._stalled or time.monotonic() - since > STALL:
            group.extend_leases()
        run(jobs, group)
        group.write()
        due = self._notices.due(group.topics)
        self._session.commit(due)
        self._attempt_cache.keep(group.seen)
        self._notices.sent(due, group.topics)
        self._stalled = time.monotonic() - since > STALL
        return group.topics

    def _run(self, jobs: list[_Job], tx: Transaction) -> None:
        bulks: dict[Any, list[_Job]] = defaultdict(list)
        for job in jobs:
            job.error = None
            if isinstance(job.verb, Bulk):
                bulks[job.verb.change].append(job)
            else:
                job.result = job.verb(tx)
        for change, merged in bulks.items():
            results = iter(change(tx, [item for job in merged for item in job.verb.items]))
            for job in merged:
                job.result = list(islice(results, len(job.verb.items)))

    def _run_each_alone(self, jobs: list[_Job], group: Transaction) -> None:
        for job in jobs:
            job.error = None
            self._run_alone(job, group)

    def _run_alone(self, job: _Job, group: Transaction) -> None:
        """Execute a verb atomically, independent of the others."""
        tx = Transaction(group.conn, group.time, group.known)
        tx.conn.execute("savepoint verb")
        try:
            job.result = job.verb(tx)
            self._session.flush()
            group.add(tx)
        except Exception as error:  # raised to the caller
            with suppress(*self._session.errors):
                self._session.flush()
            if not self._session.can_continue(error):
                raise
            tx.conn.execute("rollback to verb")
            job.error = self._session.to_store_error(error)
        tx.conn.execute("release verb")
