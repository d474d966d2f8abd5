"""The one writer of a process: a thread that commits verbs in groups.

Owns: the process's only writing connection, and the queue of posted verbs. Always true: whatever
waits is executed in one transaction; a refused verb leaves nothing behind and harms no other
(the group is undone and run again, each verb in a savepoint of its own); a verb's future resolves
after the commit, on the loop that posted it. A verb may therefore run twice: it has no effect
outside the transaction. Nobody else writes.
"""

from __future__ import annotations

import asyncio
import sqlite3
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from queue import Empty, SimpleQueue
from typing import Any, TypeVar

import msgspec

from agentrl.errors import StoreError
from agentrl.store.checkpoint import Checkpoints
from agentrl.store.connection import BUSY, Location, explained
from agentrl.store.feed import ANY, call_soon
from agentrl.store.queries import load
from agentrl.types import Counts

SQL = load("feed")
GROUP = 256  # verbs in one transaction: bounds how long other processes wait for the lock
COUNTERS = dict.fromkeys(Counts.__struct_fields__, 0)
PAUSE = 0.001  # seconds between two tries for the write lock
T = TypeVar("T")


@dataclass(slots=True)
class Transaction:
    """What the verbs of a group see: the connection, the time, and where they say what they
    changed. What they say is written once and last: then the rows that all writers share are
    locked for the shortest time, in one order."""

    conn: sqlite3.Connection
    now: float  # unix seconds
    topics: int = 0
    events: list[tuple[str, str, str]] = field(default_factory=list)
    counts: dict[str, Counter[str]] = field(default_factory=lambda: defaultdict(Counter))

    def note(self, run: str, kind: str, id: str, topics: int = 0) -> None:
        """Adds to the change feed; `topics` are those that must be looked at now."""
        self.events.append((run, kind, id))
        self.topics |= ANY | topics

    def count(self, run: str, **change: int) -> None:
        """Adds to the counters of a run, named as the fields of `Counts`."""
        counts = self.counts[run]
        for name, more in change.items():
            counts[name] += more

    def add(self, other: Transaction) -> None:
        """Everything that another verb changed."""
        self.topics |= other.topics
        self.events += other.events
        for run, change in other.counts.items():
            self.count(run, **change)


Verb = Callable[[Transaction], T]


@dataclass(slots=True, eq=False)
class _Job:
    verb: Verb[Any]
    loop: asyncio.AbstractEventLoop
    future: asyncio.Future[Any]
    result: Any = None
    error: Exception | None = None

    def resolve(self) -> None:
        if self.future.done():  # its caller was cancelled
            return
        if self.error is None:
            self.future.set_result(self.result)
        else:
            self.future.set_exception(self.error)


class Writer:
    """Group commit. `ring(topics)` is called after every commit that changed something."""

    def __init__(
        self, location: Location, clock: Callable[[], float], ring: Callable[[int], None]
    ) -> None:
        self._location = location
        self._clock = clock
        self._ring = ring
        self._jobs: SimpleQueue[_Job | None] = SimpleQueue()
        self._closed = False
        self._conn = location.connect()  # waits while another process recovers or closes the file
        self._checkpoints = Checkpoints(location)
        self._conn.execute("pragma busy_timeout = 0")  # from here on `_begin` waits by itself
        self._thread = threading.Thread(target=self._serve, name="store-writer", daemon=True)
        self._thread.start()

    def post(self, verb: Verb[T]) -> asyncio.Future[T]:
        """From any running loop. The future resolves after the commit."""
        if self._closed:
            raise StoreError(f"Store {self._location.path} is closed.")
        loop = asyncio.get_running_loop()
        future: asyncio.Future[T] = loop.create_future()
        self._jobs.put(_Job(verb, loop, future))
        return future

    def close(self) -> None:
        """Blocks until everything posted is committed."""
        self._closed = True
        self._jobs.put(None)
        self._thread.join()
        self._checkpoints.close()
        self._conn.close()

    def _serve(self) -> None:
        open_ = True
        while open_:
            batch = [self._jobs.get()]
            while len(batch) < GROUP and batch[-1] is not None:
                try:
                    batch.append(self._jobs.get_nowait())
                except Empty:
                    break
            open_ = batch[-1] is not None
            jobs = [job for job in batch if job is not None]
            if jobs:
                topics = self._commit(jobs)
                _resolve_all(jobs)
                self._checkpoints.committed(self._conn)
                if topics:
                    self._ring(topics)

    def _commit(self, jobs: list[_Job]) -> int:
        """One transaction; returns the topics it touched. Errors go to the jobs."""
        try:
            try:
                return self._transact(jobs, self._run)
            except Exception:  # noqa: BLE001 - met again below, alone, and delivered
                self._rollback()
                return self._transact(jobs, self._run_alone)
        except sqlite3.Error as error:
            self._rollback()
            for job in jobs:
                job.error = job.error or explained(self._location.path, error)
            return 0

    def _transact(self, jobs: list[_Job], run: Callable[[_Job, Transaction], None]) -> int:
        self._begin()
        group = Transaction(self._conn, self._clock())
        for job in jobs:
            run(job, group)
        for name, change in sorted(group.counts.items()):
            self._conn.execute(SQL["count"], {**COUNTERS, **change, "run": name})
        if group.events:
            self._conn.execute(SQL["add_events"], (msgspec.json.encode(group.events).decode(),))
        self._conn.execute("commit")
        return group.topics

    def _begin(self) -> None:
        """Takes the write lock of the file. SQLite's own waiting sleeps for up to 100 ms at a
        time, so that one busy process would starve the others; this looks every millisecond."""
        deadline = time.monotonic() + BUSY
        while True:
            try:
                self._conn.execute("begin immediate")
                return
            except sqlite3.OperationalError as error:
                busy = error.sqlite_errorcode & 0xFF == sqlite3.SQLITE_BUSY
                if not busy or time.monotonic() > deadline:
                    raise
            time.sleep(PAUSE)

    def _run(self, job: _Job, tx: Transaction) -> None:
        job.result = job.verb(tx)

    def _run_alone(self, job: _Job, group: Transaction) -> None:
        """All of the verb or nothing, whatever becomes of the others."""
        tx = Transaction(group.conn, group.now)
        tx.conn.execute("savepoint verb")
        try:
            job.result = job.verb(tx)
            group.add(tx)
        except Exception as error:  # delivered to the caller
            if not tx.conn.in_transaction:  # a full disk undoes the whole group
                raise
            tx.conn.execute("rollback to verb")
            job.error = explained(self._location.path, error)
        tx.conn.execute("release verb")

    def _rollback(self) -> None:
        if self._conn.in_transaction:
            self._conn.execute("rollback")


def _resolve_all(jobs: list[_Job]) -> None:
    """One wake-up per loop, however many of its verbs were committed."""
    by_loop: dict[asyncio.AbstractEventLoop, list[_Job]] = defaultdict(list)
    for job in jobs:
        by_loop[job.loop].append(job)
    for loop, mine in by_loop.items():
        call_soon(loop, _resolve, mine)


def _resolve(jobs: list[_Job]) -> None:
    for job in jobs:
        job.resolve()
