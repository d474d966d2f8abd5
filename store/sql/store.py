"""The verbs of the store, common to all SQL databases.

Owns: the writer, the reader threads and the feed of this process. Invariant: only the writer
writes; a verb returns after its commit; readers see the last commit and are never blocked. One
object may be used from several event loops and threads.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine, Sequence
from functools import partial
from typing import Any, Concatenate, ParamSpec, Self, TypeVar

from agentrl.core import types
from agentrl.core.errors import Forbidden, Invalid
from agentrl.store import records, rows
from agentrl.store.sql import browse, maintenance, traces
from agentrl.store.sql import datasets as dataset_verbs  # `datasets` is a verb, too
from agentrl.store.sql import rollouts as rollout_verbs
from agentrl.store.sql import runs as run_verbs
from agentrl.store.sql.database import (
    ANY,
    GROUPS,
    QUEUE,
    Connection,
    Feed,
    ReaderThreads,
    ReadPool,
    Session,
    load_sql,
)
from agentrl.store.sql.runs import answer_once
from agentrl.store.sql.writer import Bulk, Transaction, Writer, WriteVerb

SQL = load_sql("feed")
P = ParamSpec("P")
T = TypeVar("T")
Verb = Callable[Concatenate["SqlStore", P], Coroutine[Any, Any, T]]


def _reading(query: Callable[Concatenate[Connection, P], T]) -> Verb[P, T]:
    """Make a verb that runs a query on a reader thread."""

    async def read(self: SqlStore, /, *args: P.args, **kwargs: P.kwargs) -> T:
        return await self._readers.read(lambda conn: query(conn, *args, **kwargs))

    return read


def _writing(change: Callable[Concatenate[Transaction, P], T]) -> Verb[P, T]:
    """Make a verb that applies a change in a transaction of the writer."""

    async def write(self: SqlStore, /, *args: P.args, **kwargs: P.kwargs) -> T:
        return await self._writer.post(lambda tx: change(tx, *args, **kwargs))

    return write


def _newest(conn: Connection) -> int:
    return int(conn.execute(SQL["cursor"]).fetchone()["newest"])


class NoWriter(Writer):
    """The writer of a read-only store, which refuses all verbs."""

    def __init__(self, name: str) -> None:
        self._name = name

    def post(self, verb: WriteVerb[T]) -> asyncio.Future[T]:
        raise Forbidden(f"Store {self._name} was opened for reading only: open it for writing.")

    def close(self) -> None:
        """Do nothing."""


class SqlStore:
    """See `agentrl.store.base.Store` for the verbs. `stop_listening` stops the thread that listens
    to other processes; `shrink` returns free space to the file system. Without a `session` the
    store is read-only."""

    def __init__(
        self,
        url: str,
        session: Session | None,
        read_pool: ReadPool,
        feed: Feed,
        *,
        stop_listening: Callable[[], None],
        shrink: Callable[[], None],
    ) -> None:
        self.url = url
        self._feed = feed
        self._stop_listening, self._shrink = stop_listening, shrink
        self._readers = ReaderThreads(read_pool)
        name = read_pool.name
        self._writer = NoWriter(name) if session is None else Writer(name, session, feed.notify)

    async def close(self) -> None:
        await asyncio.to_thread(self._close)

    def _close(self) -> None:
        self._writer.close()
        self._stop_listening()
        self._readers.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *error: object) -> None:
        await self.close()

    # -- runs --------------------------------------------------------------------------------------

    async def open_run(
        self,
        run: str,
        config: dict[str, types.Json],
        *,
        owner: str = "",
        lease: float = 0.0,
        gone: str = "",
    ) -> types.RunState:
        rows.check_id("The name of a run", run)
        rows.check_ids("A run's owner", (owner, gone))
        open_run = partial(
            run_verbs.open_run, run=run, config=config, owner=owner, lease=lease, gone=gone
        )
        return await self._writer.post(answer_once(open_run, types.RunState))

    hold_run = _writing(run_verbs.hold_run)

    async def commit_step(self, commit: types.StepCommit) -> None:
        credits, record = run_verbs.prepare(commit)
        step = partial(run_verbs.commit_step, commit=commit, credits=credits, record=record)
        await self._writer.post(step)

    rewind = _writing(maintenance.rewind)

    async def claim_groups(
        self,
        run: str,
        epoch: int,
        n: int,
        *,
        ordered: bool = False,
        groups: Sequence[str] | None = None,
        timeout: float | None = None,
    ) -> list[types.Group]:
        rows.check_positive("n", n)
        if ordered and groups is not None:
            raise Invalid("claim_groups takes groups in order, or those that are named: not both.")

        def claim(tx: Transaction, last: bool) -> list[str] | None:
            return run_verbs.claim_groups(
                tx, run, epoch, n, ordered=ordered, groups=groups, last=last
            )

        ids = await self._until(GROUPS, claim, timeout)
        return await self._readers.read(partial(traces.groups, run=run, ids=ids))

    publish = _writing(run_verbs.publish)
    log = _writing(run_verbs.log)
    put_documents = _writing(run_verbs.put_documents)

    # -- queue -------------------------------------------------------------------------------------

    async def enqueue(
        self, rollouts: Sequence[types.NewRollout], *, epoch: int | None = None
    ) -> int:
        for rollout in rollouts:
            rows.check_rollout(rollout)
        enqueue = partial(rollout_verbs.enqueue, rollouts=rollouts, epoch=epoch)
        return await self._writer.post(answer_once(enqueue, int))

    async def claim(
        self,
        n: int,
        *,
        runner: str,
        lease: float,
        run: str | None = None,
        claim_id: str | None = None,
        timeout: float = 0.0,
    ) -> list[types.Attempt]:
        rows.check_positive("n", n)
        rows.check_lease(lease)
        rows.check_ids("A claim's id or runner", (runner, claim_id or ""))
        if claim_id == "":
            raise Invalid("claim_id is empty: give each claim an id of its own, or none.")

        def claim(tx: Transaction, last: bool) -> list[types.Attempt] | None:
            claimed = rollout_verbs.claim(
                tx, n, runner=runner, lease=lease, run=run, claim_id=claim_id
            )
            return [] if claimed is None and last else claimed

        return await self._until(QUEUE, claim, timeout)

    heartbeat = _writing(rollout_verbs.heartbeat)

    async def finish(self, outcomes: Sequence[types.Outcome]) -> list[bool]:
        for outcome in outcomes:
            rows.check_outcome(outcome)
        clean = [rows.clean_outcome(outcome) for outcome in outcomes]
        return await self._writer.post(Bulk(rollout_verbs.finish, clean))

    claims = _reading(rollout_verbs.claims)
    owner = _reading(rollout_verbs.owner)

    async def cancel(self, rollouts: Sequence[str]) -> int:
        return await self._writer.post(
            answer_once(partial(rollout_verbs.cancel, rollouts=rollouts), int)
        )

    # -- traces ----------------------------------------------------------------------------------

    async def add_transitions(self, transitions: Sequence[types.Transition]) -> list[bool]:
        calls = [traces.prepare(call) for call in transitions]
        return await self._writer.post(Bulk(traces.add_transitions, calls))

    async def add_spans(self, spans: Sequence[types.Span]) -> None:
        rows.check_ids("The id of a span", (span.id for span in spans))
        await self._writer.post(partial(traces.add_spans, spans=spans))

    async def put_images(self, run: str, images: Sequence[types.Image]) -> None:
        columns = traces.prepare_images(images)
        await self._writer.post(partial(traces.put_images, run=run, columns=columns))

    # -- reading -----------------------------------------------------------------------------------

    run = _reading(run_verbs.state)
    runs = _reading(run_verbs.names)
    rollouts = _reading(traces.rollouts)
    groups = _reading(browse.groups)
    search = _reading(browse.search)
    trace = _reading(traces.trace)
    outline = _reading(traces.outline)
    attempts = _reading(browse.attempts)
    credits = _reading(traces.credits)
    steps = _reading(run_verbs.steps)
    metric_names = _reading(browse.metric_names)
    series = _reading(browse.series)
    counts = _reading(run_verbs.counts)
    failures = _reading(rollout_verbs.failures)
    policies = _reading(run_verbs.policies)
    documents = _reading(run_verbs.documents)
    images = _reading(traces.images)

    # -- data sets ---------------------------------------------------------------------------------

    draft_dataset = _writing(dataset_verbs.draft_dataset)

    async def add_items(
        self, name: str, version: int, items: Sequence[records.Item], sides: Sequence[records.Side]
    ) -> None:
        dataset_verbs.check_items(items, sides)
        add = partial(dataset_verbs.add_items, name=name, version=version, items=items, sides=sides)
        await self._writer.post(add)

    commit_dataset = _writing(dataset_verbs.commit_dataset)
    datasets = _reading(dataset_verbs.datasets)
    items = _reading(dataset_verbs.items)
    sides = _reading(dataset_verbs.sides)
    calls = _reading(dataset_verbs.calls)
    add_rewards = _writing(traces.add_rewards)
    add_judgements = _writing(dataset_verbs.add_judgements)
    judgement = _reading(dataset_verbs.judgement)
    add_logprobs = _writing(dataset_verbs.add_logprobs)
    logprobs = _reading(dataset_verbs.logprobs)

    # -- change feed -------------------------------------------------------------------------------

    cursor = _reading(_newest)

    async def wait(self, cursor: int, *, timeout: float | None = None) -> int:
        return await self._read_until(lambda newest: newest > cursor, _newest, timeout)

    async def settled(self, group: str, *, timeout: float | None = None) -> bool:
        def look(tx: Transaction, last: bool) -> bool | None:
            return rollout_verbs.settled(tx.conn, group) or (False if last else None)

        if not isinstance(self._writer, NoWriter):
            return await self._until(GROUPS, look, timeout)
        return await self._read_until(bool, partial(rollout_verbs.settled, group=group), timeout)

    # -- maintenance -------------------------------------------------------------------------------

    async def stats(self) -> records.Stats:
        return await maintenance.stats(self._readers)

    async def prune(
        self,
        *,
        run: str | None = None,
        keep_last: int | None = None,
        older_than: float | None = None,
        dry_run: bool = False,
        after: int | None = None,
        seconds: float | None = None,
    ) -> records.Pruned:
        now = await self._writer.post(lambda tx: tx.now)
        limits = maintenance.limits(now, run, keep_last, older_than)
        options: Any = {"dry_run": dry_run, "after": after, "seconds": seconds}
        return await maintenance.prune(self._readers, self._writer, limits, **options)

    async def forget(self, rollouts: Sequence[str], *, dry_run: bool = False) -> records.Forgotten:
        delete = partial(maintenance.forget, rollouts=rollouts, dry_run=dry_run)
        return await self._writer.post(answer_once(delete, records.Forgotten))

    async def vacuum(self) -> None:
        await self._writer.post(lambda _: None)  # raises Forbidden in a read-only store
        await asyncio.to_thread(self._shrink)
        await self.extend_leases()

    extend_leases = _writing(Transaction.extend_leases)
    """Call after an outage, before the first claim: extends every lease, including expired ones
    whose rollouts were not claimed again."""

    async def _read_until(
        self, done: Callable[[T], bool], query: Callable[[Connection], T], timeout: float | None
    ) -> T:
        """Repeat a query at every change until its result is `done`; return the last result."""
        remaining = _countdown(timeout)
        while True:
            ticket = self._feed.ticket(ANY)
            result = await self._readers.read(query)
            if done(result) or remaining() == 0.0:
                return result
            await self._feed.changed(ANY, ticket, remaining())

    async def _until(
        self,
        topic: int,
        look: Callable[[Transaction, bool], T | None],
        timeout: float | None,
    ) -> T:
        """Call `look` until it returns a result: at every notification of the topic, when the next
        lease expires, and a `last` time at the deadline, when it must return one."""
        remaining = _countdown(timeout)
        while True:
            last = remaining() == 0.0
            ticket = self._feed.ticket(topic)

            def verb(tx: Transaction, last: bool = last) -> tuple[T | None, float | None]:
                if rollout_verbs.expire_leases(tx):
                    tx.settle_groups()  # makes settled groups visible to `look`
                result = look(tx, last)
                return result, rollout_verbs.next_expiry(tx) if result is None else None

            result, expires = await self._writer.post(verb)
            if result is not None:
                return result
            ends = (end for end in (remaining(), expires) if end is not None)
            await self._feed.changed(topic, ticket, min(ends, default=None))


def _countdown(timeout: float | None) -> Callable[[], float | None]:
    """Return a function with the remaining seconds, or None without a timeout."""
    end = None if timeout is None else time.monotonic() + timeout
    return lambda: None if end is None else max(0.0, end - time.monotonic())
