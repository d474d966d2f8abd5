"""The writer of an open store: commits verbs in groups, in its thread or on their event loop.

Owns: the store's only writing session in this process, and the queue of posted verbs. Invariants:
  * All waiting verbs are executed in one transaction; a verb's future resolves after the commit, on
    the loop that posted it.
  * A refused verb stores nothing and does not affect the others: the transaction is rolled back and
    run again, each verb in a savepoint. A verb may therefore run several times, and must have no
    effect outside the transaction.
  * Every posted verb gets a result or an error. An unexpected error ends the writer and is raised
    for all waiting and later verbs.
  * After a time in which nobody could write (a vacuum, a failover) every lease is extended.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import islice
from queue import Empty, SimpleQueue
from typing import Any, Generic, TypeVar

import msgspec

from agentrl.errors import StoreError, Unavailable
from agentrl.store.database import Session, WritingConnection, load_sql
from agentrl.store.feed import ANY, GROUPS, QUEUE, resolve, settle
from agentrl.store.tree import AttemptCalls, KnownAttempts
from agentrl.types import Counts, Purpose

SQL = load_sql("feed")
EXTEND_LEASES = load_sql("rollouts")["resume"]
STALL = 5.0  # seconds: a heartbeat that waits longer for its transaction may be too late
GRACE = 10.0  # seconds by which leases are extended after a stall, for waiting heartbeats
GROUP = 256  # verbs per transaction: bounds the time that other processes wait for the lock
FEW, SEVERAL = 8, 64  # items of a verb, and verbs of a transaction, on an event loop
HOPS = 2  # iterations of an event loop in which others may join its transaction
SLOW, PAUSE = 0.1, 1.0  # seconds: a transaction that held up an event loop, and until the next try
HASTE, LEISURE = 0.002, 0.05  # minimum seconds between notifications: of work, of other changes
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
        """Extend every lease to at least `GRACE` seconds, as nobody could renew it. This revives
        expired leases whose rollouts were not claimed again."""
        self.conn.execute(EXTEND_LEASES, {"until": self.now + GRACE, "grace": GRACE})

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
        for run, group, found in shrunk:
            row = found.fetchone()
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
    """A verb over a list with a result for each item; the writer merges the calls of a group. They
    are concurrent, hence their order is arbitrary."""

    change: Callable[[Transaction, Sequence[Item]], list[T]]
    items: Sequence[Item]

    def __call__(self, tx: Transaction) -> list[T]:
        return self.change(tx, self.items)


@dataclass(slots=True, eq=False)
class _Job:
    verb: Any  # a WriteVerb
    future: asyncio.Future[Any]
    posted: float  # on the monotonic clock
    result: Any = None
    error: Exception | None = None


class Writer:
    """Group commit. Calls `notify(topics, told)` after every commit with changes: `topics` for
    waiters of this process, `told` for other processes.

    Each notification wakes every other process, whether it has waiters or not: with eight processes
    that write calls one by one this cost more than writing. So notifications are merged for a short
    time; the first after a pause is sent at once.

    A small verb is executed on its event loop if its transaction can begin at once: to pass it to
    the thread and back takes as long as to execute it. If a lock is held, the disk is slow or
    many verbs wait, the thread executes these too, for `PAUSE` seconds."""

    def __init__(self, name: str, session: Session, notify: Callable[[int, int], None]) -> None:
        self._name, self._session, self._notify = name, session, notify
        self._jobs: SimpleQueue[_Job | None] = SimpleQueue()
        self._lock = threading.Lock()  # a verb is only queued while the writer can answer it
        self._here: dict[asyncio.AbstractEventLoop, list[_Job]] = {}  # verbs to execute there
        self._turn = threading.RLock()  # held by whoever uses the session
        self._passed = 0  # verbs that the thread has not executed yet; none may overtake them
        self._threaded = 0.0  # time until which the thread executes all verbs, monotonic clock
        self._closed = False
        self._failure: BaseException | None = None  # the error that ended the writer
        self._stalled = False  # the previous transaction took long
        self._known = KnownAttempts()
        self._owed = 0  # topics that other processes were not notified of yet
        self._told = -LEISURE  # time of their last notification, monotonic clock
        self._thread = threading.Thread(target=self._serve, name="store-writer", daemon=True)
        self._thread.start()

    def post(self, verb: WriteVerb[T], items: int = GROUP) -> asyncio.Future[T]:
        """Queue a verb, from any running loop. The future resolves after the commit. `items`: how
        many rows it writes, about; with few it may be executed on the event loop."""
        loop = asyncio.get_running_loop()
        future: asyncio.Future[T] = loop.create_future()
        with self._lock:
            if self._closed:
                raise StoreError(f"Store {self._name} is closed.")
            if self._failure is not None:
                raise self._ended(self._failure)
            job, waiting = _Job(verb, future, time.monotonic()), self._here.get(loop, [])
            # An interrupt may have ended the callback of those that wait.
            lost = bool(waiting) and job.posted - waiting[0].posted > PAUSE
            if items > FEW or job.posted < self._threaded or lost:
                self._queue([*self._here.pop(loop, []), job])
            elif waiting:
                waiting.append(job)
            else:
                for other in [other for other in self._here if other.is_closed()]:
                    self._queue(self._here.pop(other))  # it ended before it executed them
                # Scheduled first: after an interrupt in between, no verb would be executed.
                loop.call_soon(self._execute_here, loop, HOPS)
                self._here[loop] = [job]
        return future

    def close(self) -> None:
        """Block until all posted verbs are committed."""
        with self._lock:
            self._closed = True
            for jobs in self._here.values():
                self._queue(jobs)
            self._here.clear()
            self._jobs.put(None)
        self._thread.join()

    def _serve(self) -> None:
        jobs: list[_Job] = []
        while True:
            with self._lock:  # whoever passes the last verbs holds it until all are queued
                self._passed -= len(jobs)
                if (self._closed or self._failure) and self._jobs.empty():
                    break
            jobs = self._waiting()
            with self._turn:
                try:
                    self._execute(jobs)
                except BaseException as error:  # noqa: BLE001 - otherwise callers would wait
                    self._fail(jobs, error)
        with self._turn:
            self._session.close()  # ends a transaction that failed, which blocks other processes

    def _execute_here(self, loop: asyncio.AbstractEventLoop, hops: int) -> None:
        """Execute the verbs of this event loop on it, or pass them to the thread."""
        jobs, tried, begun, since, owed = list[_Job](), False, False, 0.0, self._owed
        try:
            if hops:
                loop.call_soon(self._execute_here, loop, hops - 1)
                return
            mine = self._turn.acquire(blocking=False)
            since, owed = time.monotonic(), self._owed
            with self._lock:
                jobs = self._here.pop(loop, [])  # none if the store was closed
                tried = mine and not self._passed
                begun = tried and 0 < len(jobs) <= SEVERAL and self._session.try_begin()
                if not begun:
                    self._queue(jobs)
            if begun and not self._execute(jobs, here=True):
                with self._lock:
                    self._queue(jobs)
        except BaseException as error:  # also a signal, which may come anywhere
            self._fail(jobs, error)
            if not isinstance(error, Exception):
                raise
        finally:
            with suppress(RuntimeError):  # the thread has the turn
                self._turn.release()
        if self._owed & ~owed:
            self._jobs.put(None)  # the thread will notify others, perhaps earlier than it planned
        if jobs and tried and not (begun and time.monotonic() - since < SLOW):
            self._threaded = time.monotonic() + PAUSE

    def _execute(self, jobs: list[_Job], *, here: bool = False) -> bool:
        """Commit a group of verbs, answer them, and notify others if it is time. False, without an
        effect, if `here`, on their event loop, it would have to wait."""
        if self._failure is not None:
            self._refuse(jobs, self._failure)
            return True
        before = self._owed
        topics = self._commit(jobs, here=here) if jobs else 0
        if topics is None:
            return False
        answer = settle if here else resolve
        answer((job.future, job.error or job.result) for job in jobs)
        told = (before | topics) & ~self._owed
        if not told and self._owed and (self._closed or self._patience() <= 0.0):
            told = self._tell()
        if topics or told:
            self._notify(topics, told)
        return True

    def _queue(self, jobs: list[_Job]) -> None:
        """Pass verbs to the thread; with the lock held."""
        self._passed += len(jobs)
        for job in jobs:
            self._jobs.put(job)

    def _waiting(self) -> list[_Job]:
        """Return the next verbs, none if a notification may be due or the store is closed."""
        batch: list[_Job | None] = []
        with suppress(Empty):
            batch.append(self._jobs.get(timeout=self._patience() if self._owed else None))
            while len(batch) < GROUP:
                batch.append(self._jobs.get_nowait())
        return [job for job in batch if job is not None]

    def _patience(self, more: int = 0) -> float:
        """Return the seconds until other processes must be notified."""
        pause = HASTE if (self._owed | more) & (QUEUE | GROUPS) else LEISURE
        return max(0.0, self._told + pause - time.monotonic())

    def _tell(self) -> int:
        """Notify other processes outside a transaction with changes; return the topics."""
        told, self._owed, self._told = self._owed, 0, time.monotonic()
        with suppress(*self._session.errors):  # they also poll occasionally
            self._session.tell(told)
        return told

    def _fail(self, jobs: list[_Job], error: BaseException) -> None:
        """Fail these verbs and all waiting ones; later ones are refused. The thread ends."""
        with self._lock:
            self._failure = error
            jobs = [*jobs, *(job for mine in self._here.values() for job in mine)]
            self._here.clear()
            self._jobs.put(None)  # ends the thread, after the queued verbs
        self._refuse(jobs, error)

    def _refuse(self, jobs: list[_Job], error: BaseException) -> None:
        resolve((job.future, self._ended(error)) for job in jobs)

    def _ended(self, error: BaseException) -> Unavailable:
        ended = Unavailable(
            f"Store {self._name}: its writer met an error that nobody foresaw ({error!r}) and has "
            "ended: open the store anew."
        )
        ended.__cause__ = error
        return ended

    def _commit(self, jobs: list[_Job], *, here: bool) -> int | None:
        """Execute one transaction and return its topics; None if `here`, on an event loop, a second
        one would wait. Errors are stored in the jobs."""
        since = time.monotonic()
        while True:
            try:
                try:
                    return self._transact(jobs, self._run, since)
                except Exception:  # noqa: BLE001 - raised again below, only for its verb
                    self._session.rollback()
                    if here and not self._session.try_begin():
                        return None
                    return self._transact(jobs, self._run_each_alone, since)
            except self._session.errors as error:
                self._session.rollback()
                if self._session.can_retry(error, since):
                    continue
                for job in jobs:
                    job.error = job.error or self._session.to_store_error(error)
                return 0

    def _transact(
        self, jobs: list[_Job], run: Callable[[list[_Job], Transaction], None], since: float
    ) -> int:
        group = Transaction(self._session.conn, self._session.begin(), self._known)
        if self._stalled or time.monotonic() - since > STALL:
            group.extend_leases()
        run(jobs, group)
        group.write()
        owed = self._owed | group.topics
        now = bool(owed) and self._patience(owed) <= 0.0
        self._session.commit(owed if now else 0)
        self._known.keep(group.seen)
        self._owed = 0 if now else owed
        self._told = time.monotonic() if now else self._told
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
        for change, some in bulks.items():
            results = iter(change(tx, [item for job in some for item in job.verb.items]))
            for job in some:
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
