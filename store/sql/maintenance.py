"""Maintenance verbs: size of a store, prune and rewind.

Invariant: a rollout and all rows of its attempts are removed in one transaction, so readers never
see a partial one; a transaction of a prune removes about `ROWS_PER_TRANSACTION`, for which other
writers wait tens of milliseconds, and keeps the counters, steps and metrics of runs. The next prune
continues a killed one. A rewind is one transaction: it settles the groups of its steps again and
removes their credit, rewards and metrics; runners' records stay.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import msgspec
from msgspec.structs import replace

from agentrl.errors import Conflict, Invalid
from agentrl.store import rows
from agentrl.store.records import Pruned, Stats
from agentrl.store.sql import datasets, images, rollouts, runs
from agentrl.store.sql.database import Connection, ReaderThreads, load_sql
from agentrl.store.sql.feed import GROUPS
from agentrl.store.sql.writer import Transaction, Writer
from agentrl.types import RolloutState

SQL = load_sql("maintenance")
FEED = load_sql("feed")
REWIND = load_sql("rewind")
ROWS_PER_TRANSACTION = 2000  # calls and spans to remove; a single rollout may have more
ROLLOUTS_PER_READ = 1024  # rollouts per read
EVENTS_PER_TRANSACTION = 10_000  # range of cursors per transaction
AT_REST = ("trained", "discarded", "settled")  # states of groups without queued or running rollouts
TABLES = ("credits", "transitions", "spans", "rewards", "rollout_images", "attempts", "rollouts")
Limits = dict[str, Any]  # `run`, `keep`: committed steps, `before`: latest end, `now`: unix seconds


def limits(now: float, run: str | None, keep_last: int | None, older_than: float | None) -> Limits:
    """Build the limits of a prune. Raises Invalid if both are missing or one is invalid."""
    if keep_last is None and older_than is None:
        raise Invalid("Give keep_last (steps), older_than (seconds) or both.")
    if keep_last is not None and keep_last < 0:
        raise Invalid(f"keep_last is a number of steps, not {keep_last}.")
    if older_than is not None and not 0 <= older_than < math.inf:
        raise Invalid(f"older_than is a number of seconds, not {older_than}.")
    before = math.inf if older_than is None else now - older_than
    aged = int(older_than is not None)
    return {"run": run, "keep": keep_last or 0, "before": before, "aged": aged, "now": now}


async def stats(readers: ReaderThreads) -> Stats:
    """The tables are counted at the same time, each as it is then."""

    def count(conn: Connection, table: str) -> int:
        return int(conn.execute(SQL[f"rows_{table}"]).fetchone()["n"])

    def of_all(conn: Connection) -> tuple[int, int, int]:
        size, newest = conn.execute(SQL["size"]).fetchone(), conn.execute(FEED["cursor"]).fetchone()
        return size["bytes"], size["free"], newest["newest"]

    tables = [name.removeprefix("rows_") for name in SQL if name.startswith("rows_")]
    first = sorted(tables, key=lambda name: name not in TABLES)  # the large ones
    counted = await asyncio.gather(*(readers.read(partial(count, table=name)) for name in first))
    rows = dict(zip(first, counted, strict=True))
    size, free, cursor = await readers.read(of_all)
    return Stats(rows={name: rows[name] for name in tables}, bytes=size, free=free, cursor=cursor)


async def prune(
    readers: ReaderThreads,
    writer: Writer,
    limits: Limits,
    *,
    dry_run: bool,
    after: int | None = None,
    seconds: float | None = None,
) -> Pruned:
    """Prune in many transactions, see the module's docstring."""
    if seconds is not None and not 0 <= seconds < math.inf:
        raise Invalid(f"seconds is how long to work, not {seconds}.")
    ends = math.inf if seconds is None else time.monotonic() + seconds
    total, gone, at = Pruned(), list[str](), -1 if after is None else after
    if limits["run"] is not None:
        await readers.read(partial(runs.find_run, run=limits["run"]))
    while page := await readers.read(partial(_page, limits=limits, after=at)):
        if dry_run:
            ids = [row["id"] for row in page]
            total = _sum(total, _pruned(await readers.read(partial(_evidence, rollouts=ids))))
            gone += ids
        for part in [] if dry_run else _parts(page):
            ids = [row["id"] for row in part]
            total = _sum(total, await writer.post(partial(remove, rollouts=ids)))
            if not dry_run and time.monotonic() > ends:
                newest = await readers.read(_newest)
                return replace(total, after=part[-1]["seq"], share=part[-1]["seq"] / newest)
        at = page[-1]["seq"]
    for run in await readers.read(partial(_runs, limits=limits)):
        upto, first, events = await readers.read(partial(_old_events, limits=limits, run=run))
        if events and not dry_run:
            events = 0
            for start in range(first, upto, EVENTS_PER_TRANSACTION):
                end = min(start + EVENTS_PER_TRANSACTION, upto)
                window = {"run": run, "first": start, "upto": end}
                events += await writer.post(partial(_remove_events, window=window))
        total = _sum(total, Pruned(events=events))
    if dry_run:
        unused = await readers.read(partial(images.unused, now=limits["now"], without=gone))
        return _sum(total, unused)
    while (removed := await writer.post(images.remove_unused)).images:
        total = _sum(total, removed)
    return total


# -- rollouts --------------------------------------------------------------------------------------


def _page(conn: Connection, limits: Limits, after: int) -> list[Any]:
    columns = {**limits, "after": after, "n": ROLLOUTS_PER_READ}
    return list(conn.execute(SQL["prunable"], columns).fetchall())


def _newest(conn: Connection) -> int:
    """The position of the newest rollout; at least 1."""
    return max(1, int(conn.execute(SQL["newest_rollout"]).fetchone()["seq"]))


def _evidence(conn: Connection, rollouts: Sequence[str]) -> list[Any]:
    return list(conn.execute(SQL["evidence"], _ids(rollouts)).fetchall())


def _parts(found: Sequence[Any]) -> Iterator[list[Any]]:
    """Split rollouts into parts to remove in one transaction each."""
    part, weight = list[Any](), 0
    for row in found:
        if part and weight + row["weight"] > ROWS_PER_TRANSACTION:
            yield part
            part, weight = [], 0
        part.append(row)
        weight += row["weight"]
    if part:
        yield part


def remove(tx: Transaction, rollouts: Sequence[str]) -> Pruned:
    """Remove rollouts whose group is still at rest: an evaluation may have grown since."""
    tx.conn.execute(SQL["lock_payloads"])
    tx.conn.execute(SQL["lock_groups"], _ids(rollouts))
    found = [row for row in _evidence(tx.conn, rollouts) if row["state"] in AT_REST]
    datasets.copy_sides(tx.conn, [row["id"] for row in found])
    delete_rows(tx, [row["id"] for row in found])
    # The group of a training rollout stays, which prevents enqueuing it again.
    for run, group in sorted(
        {(r["run_id"], r["group_id"]) for r in found if r["purpose"] == "eval"}
    ):
        tx.conn.execute(SQL["delete_group"], {"run": run, "group": group})
    for run in sorted({row["run_id"] for row in found}):
        tx.add_event(run, "run", run)
    return _pruned(found)


def delete_rows(tx: Transaction, rollouts: Sequence[str]) -> None:
    """Delete rollouts with all rows of their attempts."""
    columns = _ids(rollouts)
    hashes = [row["hash"] for row in tx.conn.execute(SQL["tools"], columns)]
    for table in TABLES:
        tx.conn.execute(SQL[f"delete_{table}"], columns)
    for digest in hashes:
        tx.conn.execute(SQL["delete_payload"], {"hash": digest})


def _pruned(found: Sequence[Any]) -> Pruned:
    names = ("attempts", "transitions", "spans", "rewards", "bytes")
    return Pruned(rollouts=len(found), **{name: sum(row[name] for row in found) for name in names})


def _sum(one: Pruned, other: Pruned) -> Pruned:
    names = set(Pruned.__struct_fields__) - {"after", "share"}
    return Pruned(**{name: getattr(one, name) + getattr(other, name) for name in names})


def _ids(rollouts: Sequence[str]) -> dict[str, str]:
    return {"rollouts": rows.to_json(rollouts, "Rollouts")}


# -- events ----------------------------------------------------------------------------------------


def _runs(conn: Connection, limits: Limits) -> list[str]:
    return [row["id"] for row in conn.execute(SQL["runs"], {"run": limits["run"]})]


def _old_events(conn: Connection, limits: Limits, run: str) -> tuple[int, int, int]:
    """Return the cursor before which events may be removed, the first of them, and their number.
    The event at that cursor stays, so that the newest cursor never decreases."""
    upto = conn.execute(SQL["old_events"], {**limits, "run": run}).fetchone()["upto"]
    if upto is None:
        return 0, 0, 0
    row = conn.execute(SQL["count_events"], {"run": run, "upto": upto}).fetchone()
    return upto, row["first"] or 0, row["n"]


def _remove_events(tx: Transaction, window: dict[str, Any]) -> int:
    return tx.conn.execute(SQL["delete_events"], window).rowcount


# -- committed steps -------------------------------------------------------------------------------


def rewind(tx: Transaction, run: str, epoch: int, step: int, checkpoint: str | None) -> None:
    row = runs.find_run(tx.conn, run, epoch)
    if step < 0:
        raise Invalid(f"step is a number of committed steps, not {step}.")
    if step > row["step"]:
        raise Conflict(
            f"Run {run!r} has {row['step']} committed steps: it cannot go back to {step}."
        )
    columns = {"run": run, "step": step}
    if step < row["step"]:
        _forget_steps(tx, columns)
        _release_groups(tx, columns)
        _forget_evaluations(tx, columns)
    tx.conn.execute(REWIND["rewind_run"], {**columns, "checkpoint": checkpoint})
    tx.add_event(run, "run", run, GROUPS)


def _forget_steps(tx: Transaction, columns: dict[str, Any]) -> None:
    """Remove steps and their metrics, except the evaluation of the weights at `step`."""
    found = tx.conn.execute(runs.SQL["step"], (columns["run"], columns["step"])).fetchone()
    measured = msgspec.json.decode(found["record"])["metrics"]
    keys = [(columns["run"], columns["step"], name) for name in measured]
    tx.conn.executemany(REWIND["delete_metric"], keys)
    for statement in ("delete_metrics", "delete_steps", "reopen_step"):
        tx.conn.execute(REWIND[statement], columns)


def _release_groups(tx: Transaction, columns: dict[str, Any]) -> None:
    """Settle the groups of the steps again. Deletes pruned groups, which can then be enqueued
    again."""
    run, change = columns["run"], Counter[str]()
    tx.conn.execute(REWIND["delete_credits"], columns)
    tx.conn.execute(REWIND["delete_given"], columns)
    tx.conn.execute(runs.SQL["release_groups"], (run,))  # groups claimed for later steps
    for row in tx.conn.execute(REWIND["taken"], columns).fetchall():
        tx.conn.execute(REWIND["settle_group" if row["kept"] else "delete_group"], (row["id"],))
        change[f"groups_{row['state']}"] -= 1
        change["groups_settled"] += bool(row["kept"])
        tx.add_event(run, "group", row["id"], GROUPS)
    tx.add_counts(run, **change)


def _forget_evaluations(tx: Transaction, columns: dict[str, Any]) -> None:
    """Cancel and remove evaluations of weights that no longer exist after the rewind."""
    found = tx.conn.execute(REWIND["evaluations"], columns).fetchall()
    rollouts.cancel(tx, [row["id"] for row in found])
    tx.settle_groups()
    ended = [row["id"] for row in found if row["state"] != RolloutState.RUNNING]
    remove(tx, ended)
