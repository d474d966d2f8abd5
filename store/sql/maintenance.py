"""Maintenance: stats, prune, forget, rewind.

Invariant: a rollout and all rows of its attempts are removed in one transaction, so readers never
see a partial one; a transaction of a prune removes about `ROWS_PER_TRANSACTION`, for which other
writers wait tens of milliseconds, and keeps the counters, steps and metrics of runs. The next prune
continues a killed one. After `forget` the store has no message, answer or note of the deleted
rollouts. Images may remain unreferenced, until a prune removes them. A rewind is one transaction:
it settles the groups of its steps again and removes their credit, rewards and metrics; runners'
records stay.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import time
from collections import Counter
from collections.abc import AsyncGenerator, Iterator, Sequence
from functools import partial
from typing import Any

import msgspec
from msgspec.structs import replace

from agentrl.core.errors import Conflict, Invalid
from agentrl.core.types import RolloutState
from agentrl.store import rows
from agentrl.store.records import Forgotten, Pruned, Stats
from agentrl.store.sql import datasets, rollouts, runs, traces
from agentrl.store.sql.database import (
    GROUPS,
    Connection,
    ReaderThreads,
    load_sql,
)
from agentrl.store.sql.writer import Transaction, Writer

MAINTENANCE = load_sql("maintenance")
FEED = load_sql("feed")
REWIND = load_sql("rewind")
ROWS_PER_TRANSACTION = 2000  # calls and spans to remove; a single rollout may have more
ROLLOUTS_PER_READ = 4096
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
    """Count the rows of tables concurrently, in separate snapshots."""

    def count(conn: Connection, table: str) -> int:
        return int(conn.execute(MAINTENANCE[f"rows_{table}"]).fetchone()["n"])

    def of_all(conn: Connection) -> tuple[int, int, int]:
        size, newest = (
            conn.execute(MAINTENANCE["size"]).fetchone(),
            conn.execute(FEED["cursor"]).fetchone(),
        )
        return size["bytes"], size["free"], newest["newest"]

    tables = [name.removeprefix("rows_") for name in MAINTENANCE if name.startswith("rows_")]
    first = sorted(tables, key=lambda name: name not in TABLES)  # the large tables
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
    total, gone = Pruned(), list[str]()
    if limits["run"] is not None:
        await readers.read(partial(runs.find_run, run=limits["run"]))
    async with contextlib.aclosing(_pages(readers, limits, after)) as pages:
        async for page in pages:
            if dry_run:
                ids = [row["id"] for row in page]
                total = _sum(total, await readers.read(partial(_evidence, rollouts=ids)))
                gone += ids
            for part in [] if dry_run else _parts(page):
                ids = [row["id"] for row in part]
                total = _sum(total, await writer.post(partial(remove, rollouts=ids)))
                if time.monotonic() > ends:
                    newest = await readers.read(_newest)
                    return replace(total, after=part[-1]["seq"], share=part[-1]["seq"] / newest)
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
        unused = await readers.read(partial(traces.unused, now=limits["now"], without=gone))
        return _sum(total, unused)
    while (removed := await writer.post(traces.remove_unused)).images:
        total = _sum(total, removed)
    return total


# -- rollouts --------------------------------------------------------------------------------------


async def _pages(
    readers: ReaderThreads, limits: Limits, after: int | None
) -> AsyncGenerator[list[Any], None]:
    """Pages of rollouts that may be removed. The next page is read while one is being removed."""

    def read(after: int) -> asyncio.Task[list[Any]]:
        return asyncio.create_task(readers.read(partial(_page, limits=limits, after=after)))

    coming = read(-1 if after is None else after)
    try:
        while page := await coming:
            coming = read(page[-1]["seq"])
            yield page
    finally:
        coming.cancel()
        await asyncio.wait([coming])
        if not coming.cancelled():
            coming.exception()  # retrieves the error of a page that is not used


def _page(conn: Connection, limits: Limits, after: int) -> list[Any]:
    columns = {**limits, "after": after, "n": ROLLOUTS_PER_READ}
    return list(conn.execute(MAINTENANCE["prunable"], columns).fetchall())


def _newest(conn: Connection) -> int:
    """The position of the newest rollout; at least 1."""
    return max(1, int(conn.execute(MAINTENANCE["newest_rollout"]).fetchone()["seq"]))


def _evidence(conn: Connection, rollouts: Sequence[str]) -> Pruned:
    row = conn.execute(MAINTENANCE["evidence"], _ids(rollouts)).fetchone()
    names = ("attempts", "transitions", "spans", "rewards", "bytes")
    return Pruned(rollouts=len(rollouts), **{name: int(row[name]) for name in names})


def _parts(rollouts: Sequence[Any]) -> Iterator[list[Any]]:
    """Split rollouts into parts to remove in one transaction each."""
    part, weight = list[Any](), 0
    for row in rollouts:
        if part and weight + row["weight"] > ROWS_PER_TRANSACTION:
            yield part
            part, weight = [], 0
        part.append(row)
        weight += row["weight"]
    if part:
        yield part


def remove(tx: Transaction, rollouts: Sequence[str]) -> Pruned:
    """Remove rollouts whose group is still at rest: an evaluation may have grown since."""
    for statement in ("large_cache", "lock_payloads"):
        tx.conn.execute(MAINTENANCE[statement])
    tx.conn.execute(MAINTENANCE["lock_groups"], _ids(rollouts))
    groups = tx.conn.execute(MAINTENANCE["groups_of"], _ids(rollouts)).fetchall()
    removable = [row for row in groups if row["state"] in AT_REST]
    ids = [row["id"] for row in removable]
    removed = _evidence(tx.conn, ids)
    datasets.copy_sides(tx.conn, ids)
    delete_rows(tx, ids)
    # The group of a training rollout stays, which prevents enqueuing it again.
    for run, group in sorted(
        {(r["run_id"], r["group_id"]) for r in removable if r["purpose"] == "eval"}
    ):
        tx.conn.execute(MAINTENANCE["delete_group"], {"run": run, "group": group})
    for run in sorted({row["run_id"] for row in removable}):
        tx.add_event(run, "run", run)
    return removed


def delete_rows(tx: Transaction, rollouts: Sequence[str]) -> None:
    """Delete rollouts with all rows of their attempts."""
    columns = _ids(rollouts)
    hashes = [row["hash"] for row in tx.conn.execute(MAINTENANCE["tools"], columns)]
    for table in TABLES:
        tx.conn.execute(MAINTENANCE[f"delete_{table}"], columns)
    for digest in hashes:
        tx.conn.execute(MAINTENANCE["delete_payload"], {"hash": digest})


def _sum(a: Pruned, b: Pruned) -> Pruned:
    names = set(Pruned.__struct_fields__) - {"after", "share"}
    return Pruned(**{name: getattr(a, name) + getattr(b, name) for name in names})


def _ids(rollouts: Sequence[str]) -> dict[str, str]:
    return {"rollouts": rows.to_json(rollouts, "Rollouts")}


# -- events ----------------------------------------------------------------------------------------


def _runs(conn: Connection, limits: Limits) -> list[str]:
    return [row["id"] for row in conn.execute(MAINTENANCE["runs"], {"run": limits["run"]})]


def _old_events(conn: Connection, limits: Limits, run: str) -> tuple[int, int, int]:
    """Return the cursor before which events may be removed, the first of them, and their number.
    The event at that cursor stays, so that the newest cursor never decreases."""
    upto = conn.execute(MAINTENANCE["old_events"], {**limits, "run": run}).fetchone()["upto"]
    if upto is None:
        return 0, 0, 0
    row = conn.execute(MAINTENANCE["count_events"], {"run": run, "upto": upto}).fetchone()
    return upto, row["first"] or 0, row["n"]


def _remove_events(tx: Transaction, window: dict[str, Any]) -> int:
    return tx.conn.execute(MAINTENANCE["delete_events"], window).rowcount


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
    step = tx.conn.execute(runs.SQL["step"], (columns["run"], columns["step"])).fetchone()
    measured = msgspec.json.decode(step["record"])["metrics"]
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
    evaluations = tx.conn.execute(REWIND["evaluations"], columns).fetchall()
    rollouts.cancel(tx, [row["id"] for row in evaluations])
    tx.settle_groups()
    ended = [row["id"] for row in evaluations if row["state"] != RolloutState.RUNNING]
    remove(tx, ended)


FORGET = load_sql("forget")


def forget(tx: Transaction, rollouts: Sequence[str], *, dry_run: bool = False) -> Forgotten:
    """Delete rollouts, their branches, and their items, sides and judgements."""
    tx.conn.execute(MAINTENANCE["lock_payloads"])
    tx.conn.execute(datasets.SQL["lock_datasets"])
    family = tx.conn.execute(FORGET["family"], _list("rollouts", rollouts)).fetchall()
    tx.conn.execute(MAINTENANCE["lock_groups"], _list("rollouts", [r["id"] for r in family]))
    free = [row for row in family if _is_free(row["state"], row["group_state"])]
    gone, not_deleted = (
        [row["id"] for row in free],
        [row["id"] for row in family if row not in free],
    )
    if dry_run:
        _, items = _items_of(tx, gone)
        return Forgotten(rollouts=len(gone), left=not_deleted, items=items)
    items = _forget_items(tx, gone)
    tx.conn.execute(FORGET["delete_judgements"], _list("rollouts", gone))
    delete_rows(tx, gone)
    _drop_groups(tx, [row["group_id"] for row in free])
    for run in sorted({row["run_id"] for row in free}):
        tx.add_event(run, "run", run, GROUPS)
    traces.remove_unused(tx)
    return Forgotten(rollouts=len(gone), left=not_deleted, items=items)


def _is_free(state: str, group_state: str) -> bool:
    return RolloutState(state).terminal and group_state != "claimed"


def _forget_items(tx: Transaction, rollouts: Sequence[str]) -> dict[str, int]:
    """Delete the sides of rollouts and the items with these sides; their versions get new
    digests."""
    sides, touched = _items_of(tx, rollouts)
    tx.conn.execute(FORGET["delete_items"], sides)
    for statement in ("delete_sides", "delete_side_images"):
        tx.conn.execute(datasets.SQL[statement])
    tx.conn.execute(FORGET["delete_logprobs"], sides)
    for dataset in touched:
        name, _, version = dataset.rpartition("@")
        datasets.seal(tx.conn, {"name": name, "version": int(version)})
    return touched


def _items_of(tx: Transaction, rollouts: Sequence[str]) -> tuple[dict[str, str], dict[str, int]]:
    """The sides of rollouts, as a list for SQL, and the number of items with such a side, by data
    set."""
    side_rows = tx.conn.execute(FORGET["sides"], _list("rollouts", rollouts)).fetchall()
    sides = _list("sides", [row["digest"] for row in side_rows])
    touched = tx.conn.execute(FORGET["touched"], sides).fetchall()
    return sides, {f"{row['dataset']}@{row['version']}": row["n"] for row in touched}


def _drop_groups(tx: Transaction, groups: Sequence[str]) -> None:
    """Delete groups without rollouts that no step has."""
    counted = Counter[tuple[str, str]]()
    for row in tx.conn.execute(FORGET["empty_groups"], _list("groups", groups)).fetchall():
        tx.conn.execute(FORGET["delete_group"], (row["id"],))
        if row["purpose"] == "train":
            counted[row["run_id"], row["state"]] += 1
    for (run, state), n in counted.items():
        tx.add_counts(run, **{f"groups_{state}": -n})


def _list(name: str, ids: Sequence[str]) -> dict[str, str]:
    return {name: rows.to_json(sorted(set(ids)), name)}
