"""The verbs of the store over an SQL database, the same for all.

Owns: the writer thread, the reader threads and the feed of this process. Always true: only the
writer writes; a verb returns after its commit; readers see the last commit and are never blocked.
One object may be used from several event loops and threads.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from functools import partial
from types import TracebackType
from typing import Self, TypeVar

from agentrl.errors import Invalid
from agentrl.store import limits, maintenance, rewind, rows, runs, traces
from agentrl.store import rollouts as queue
from agentrl.store.database import Connection, ReaderThreads, ReadPool, Session, load_sql
from agentrl.store.feed import ANY, GROUPS, QUEUE, Feed
from agentrl.store.writer import Transaction, Writer, answer_once
from agentrl.types import (
    Attempt,
    Counts,
    Credit,
    FailureCount,
    Group,
    Json,
    NewRollout,
    Outcome,
    PolicyVersion,
    Pruned,
    Purpose,
    Rollout,
    RolloutState,
    RunState,
    Span,
    Stats,
    StepCommit,
    StepRow,
    Trace,
    Transition,
)

SQL = load_sql("feed")
T = TypeVar("T")


class SqlStore:
    """See `agentrl.store.base.Store` for the verbs. `notify` is called with the topics of
    every commit, `stop_listening` ends the listening to other processes, `shrink` gives free space
    back."""

    def __init__(
        self,
        url: str,
        session: Session,
        read_pool: ReadPool,
        feed: Feed,
        *,
        notify: Callable[[int], None],
        stop_listening: Callable[[], None],
        shrink: Callable[[], None],
    ) -> None:
        self.url = url
        self._feed = feed
        self._stop_listening, self._shrink = stop_listening, shrink
        self._readers = ReaderThreads(read_pool)
        self._writer = Writer(read_pool.name, session, notify)

    async def close(self) -> None:
        await asyncio.to_thread(self._close)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        tb: TracebackType | None,
    ) -> None:
        await self.close()

    # -- runs --------------------------------------------------------------------------------------

    async def open_run(self, run: str, config: dict[str, Json]) -> RunState:
        limits.check_id("The name of a run", run)
        open_run = partial(runs.open_run, run=run, config=config)
        return await self._writer.post(answer_once(open_run, RunState))

    async def commit_step(self, commit: StepCommit) -> None:
        await self._writer.post(partial(runs.commit_step, step=runs.prepare(commit)))

    async def rewind(self, run: str, epoch: int, step: int, checkpoint: str | None) -> None:
        back = partial(rewind.rewind, run=run, epoch=epoch, step=step, checkpoint=checkpoint)
        await self._writer.post(back)

    async def claim_groups(
        self, run: str, epoch: int, n: int, *, timeout: float | None = None
    ) -> list[Group]:
        limits.check_positive("n", n)

        def claim(tx: Transaction, last: bool) -> list[str] | None:
            return runs.claim_groups(tx, run, epoch, n, last=last)

        ids = await self._until(GROUPS, claim, timeout)
        return await self._readers.read(partial(traces.groups, run=run, ids=ids))

    async def publish(self, version: PolicyVersion, *, epoch: int | None = None) -> None:
        limits.check_id("The name of a policy", version.policy)
        await self._writer.post(partial(runs.publish, version=version, epoch=epoch))

    async def log(
        self, run: str, step: int, metrics: dict[str, float], *, epoch: int | None = None
    ) -> None:
        limits.check_ids("A metric's name", metrics)
        log = partial(runs.log, run=run, step=step, metrics=metrics, epoch=epoch)
        await self._writer.post(log)

    # -- queue -------------------------------------------------------------------------------------

    async def enqueue(self, rollouts: Sequence[NewRollout]) -> int:
        for rollout in rollouts:
            limits.check_rollout(rollout)
        return await self._writer.post(answer_once(partial(queue.enqueue, rollouts=rollouts), int))

    async def claim(
        self,
        n: int,
        *,
        runner: str,
        lease: float,
        run: str | None = None,
        claim_id: str | None = None,
        timeout: float = 0.0,
    ) -> list[Attempt]:
        limits.check_positive("n", n)
        limits.check_lease(lease)
        limits.check_ids("A claim's id or runner", (runner, claim_id or ""))
        if claim_id == "":
            raise Invalid("claim_id is empty: give each claim an id of its own, or none.")

        def claim(tx: Transaction, last: bool) -> list[Attempt] | None:
            claimed = queue.claim(tx, n, runner=runner, lease=lease, run=run, claim_id=claim_id)
            return [] if claimed is None and last else claimed

        return await self._until(QUEUE, claim, timeout)

    async def heartbeat(self, attempts: Sequence[str], *, lease: float) -> list[str]:
        limits.check_lease(lease)
        beat = partial(queue.heartbeat, attempts=attempts, lease=lease)
        return await self._writer.post(beat)

    async def finish(self, outcomes: Sequence[Outcome]) -> list[bool]:
        for outcome in outcomes:
            limits.check_outcome(outcome)
        clean = [rows.clean_outcome(outcome) for outcome in outcomes]
        return await self._writer.post(partial(queue.finish, outcomes=clean))

    async def claims(self, attempts: Sequence[str]) -> dict[str, tuple[str, str | None]]:
        """Run and claim id of each attempt that exists: by these a server knows whose it is."""
        return await self._readers.read(partial(queue.claims, attempts=attempts))

    async def cancel(self, rollouts: Sequence[str]) -> int:
        return await self._writer.post(answer_once(partial(queue.cancel, rollouts=rollouts), int))

    # -- evidence ----------------------------------------------------------------------------------

    async def add_transitions(self, transitions: Sequence[Transition]) -> list[bool]:
        calls = [traces.prepare(transition) for transition in transitions]
        add = partial(traces.add_transitions, calls=calls)
        return await self._writer.post(add)

    async def add_spans(self, spans: Sequence[Span]) -> None:
        limits.check_spans(spans)
        await self._writer.post(partial(traces.add_spans, spans=spans))

    # -- reading -----------------------------------------------------------------------------------

    async def run(self, run: str) -> RunState | None:
        return await self._readers.read(partial(runs.state, run=run))

    async def runs(self) -> list[str]:
        return await self._readers.read(runs.names)

    async def rollouts(
        self,
        run: str,
        *,
        purpose: Purpose | None = None,
        step: int | None = None,
        group: str | None = None,
        state: RolloutState | None = None,
        trained: int | None = None,
        limit: int | None = None,
    ) -> list[Rollout]:
        if limit is not None and limit < 0:
            raise Invalid(f"limit is a number of rollouts, not {limit}.")
        query = partial(
            traces.rollouts,
            run=run,
            purpose=purpose,
            step=step,
            group=group,
            state=state,
            trained=trained,
            limit=limit,
        )
        return await self._readers.read(query)

    async def trace(self, rollout: str) -> Trace | None:
        return await self._readers.read(partial(traces.trace, rollout=rollout))

    async def credits(self, rollout: str) -> list[Credit]:
        return await self._readers.read(partial(traces.credits, rollout=rollout))

    async def steps(self, run: str, *, after: int = -1) -> list[StepRow]:
        return await self._readers.read(partial(runs.steps, run=run, after=after))

    async def counts(self, run: str) -> Counts:
        return await self._readers.read(partial(runs.counts, run=run))

    async def failures(self, run: str) -> list[FailureCount]:
        return await self._readers.read(partial(queue.failures, run=run))

    async def policies(self, run: str) -> dict[str, PolicyVersion]:
        return await self._readers.read(partial(runs.policies, run=run))

    # -- change feed -------------------------------------------------------------------------------

    async def cursor(self) -> int:
        def newest(conn: Connection) -> int:
            return int(conn.execute(SQL["cursor"]).fetchone()[0])

        return await self._readers.read(newest)

    async def wait(self, cursor: int, *, timeout: float | None = None) -> int:
        deadline = _Deadline(timeout)
        while True:
            ticket = self._feed.ticket(ANY)
            newest = await self.cursor()
            if newest > cursor or deadline.passed:
                return newest
            await self._feed.changed(ANY, ticket, deadline.left)

    async def settled(self, group: str, *, timeout: float | None = None) -> bool:
        def look(tx: Transaction, last: bool) -> bool | None:
            return queue.settled(tx.conn, group) or (False if last else None)

        return await self._until(GROUPS, look, timeout)

    # -- upkeep ------------------------------------------------------------------------------------

    async def stats(self) -> Stats:
        return await self._readers.read(maintenance.stats)

    async def prune(
        self,
        *,
        run: str | None = None,
        keep_last: int | None = None,
        older_than: float | None = None,
        dry_run: bool = False,
    ) -> Pruned:
        now = await self._writer.post(lambda tx: tx.now)
        limits = maintenance.limits(now, run, keep_last, older_than)
        return await maintenance.prune(
            self._readers.read, self._writer.post, limits, dry_run=dry_run
        )

    async def vacuum(self) -> None:
        await asyncio.to_thread(self._shrink)
        await self.extend_leases()

    async def extend_leases(self) -> None:
        """After a time in which no runner could reach the store: leases hold for a while, also
        those that ran out and were given to nobody else. Called before the first claim."""
        await self._writer.post(Transaction.extend_leases)

    # -- parts -------------------------------------------------------------------------------------

    async def _until(
        self, topic: int, look: Callable[[Transaction, bool], T | None], timeout: float | None
    ) -> T:
        """Looks until there is something: again at every notification of the topic, when the next
        lease runs out, and a `last` time at the deadline, when `look` must return something."""
        deadline = _Deadline(timeout)
        while True:
            last = deadline.passed
            ticket = self._feed.ticket(topic)

            def verb(tx: Transaction, last: bool = last) -> tuple[T | None, float | None]:
                if queue.expire_leases(tx):
                    tx.settle_groups()  # for this look
                return look(tx, last), queue.next_expiry(tx)

            found, expires = await self._writer.post(verb)
            if found is not None:
                return found
            left = deadline.left
            if expires is not None:
                left = expires if left is None else min(left, expires)
            await self._feed.changed(topic, ticket, left)

    def _close(self) -> None:
        self._writer.close()
        self._stop_listening()
        self._readers.close()


class _Deadline:
    """A timeout in seconds of real time; none: never."""

    def __init__(self, timeout: float | None) -> None:
        self._end = None if timeout is None else time.monotonic() + timeout

    @property
    def left(self) -> float | None:
        return None if self._end is None else max(0.0, self._end - time.monotonic())

    @property
    def passed(self) -> bool:
        return self.left == 0.0
