"""Maintenance: the size of a store, and the removal of rows that no step will read again.

Always true: a rollout goes whole, with everything its attempts left, in one transaction, so that
no reader sees half of one; a transaction removes about `ROWS` rows, so that other writers wait for
milliseconds; the counters, steps and metrics of a run stay what they were. A prune that is killed
has pruned less; the next one goes on.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

from agentrl.errors import Invalid
from agentrl.store import rows, runs
from agentrl.store.database import Connection, ReaderThreads, load_sql
from agentrl.store.writer import Transaction, Writer
from agentrl.types import Pruned, Stats

SQL = load_sql("maintenance")
FEED = load_sql("feed")
ROWS = 1000  # transitions and spans that one transaction removes, if no rollout alone has more
PAGE = 256  # rollouts looked at with one read
EVENTS = 10_000  # cursor numbers that one transaction passes over
AT_REST = ("trained", "discarded", "settled")  # groups that nobody trains any more
Limits = dict[str, Any]  # `run`, `keep` so many committed steps, ended `before`, unix seconds


def limits(now: float, run: str | None, keep_last: int | None, older_than: float | None) -> Limits:
    """What may be removed. Raises Invalid for limits that would remove everything or make no
    sense."""
    if keep_last is None and older_than is None:
        raise Invalid(
            "Say what to keep: the steps of keep_last, the seconds of older_than or both."
        )
    if keep_last is not None and keep_last < 0:
        raise Invalid(f"keep_last is a number of steps, not {keep_last}.")
    if older_than is not None and not 0 <= older_than < math.inf:
        raise Invalid(f"older_than is a number of seconds, not {older_than}.")
    before = math.inf if older_than is None else now - older_than
    return {"run": run, "keep": keep_last or 0, "before": before}


def stats(conn: Connection) -> Stats:
    size = conn.execute(SQL["size"]).fetchone()
    return Stats(
        rows={row["name"]: row["n"] for row in conn.execute(SQL["rows"])},
        bytes=size["bytes"],
        free=size["free"],
        cursor=conn.execute(FEED["cursor"]).fetchone()["newest"],
    )


async def prune(readers: ReaderThreads, writer: Writer, limits: Limits, *, dry_run: bool) -> Pruned:
    """Many transactions: see the head of this module."""
    total, after = Pruned(), -1
    if limits["run"] is not None:
        await readers.read(partial(runs.find_run, run=limits["run"]))
    while page := await readers.read(partial(_page, limits=limits, after=after)):
        after = page[-1][0]
        found = await readers.read(partial(_evidence, rollouts=[id for _, id in page]))
        if dry_run:
            total = _sum(total, _pruned(found))
        else:
            for part in _parts(found):
                total = _sum(total, await writer.post(partial(remove, rollouts=part)))
    for run in await readers.read(partial(_runs, limits=limits)):
        upto, first, events = await readers.read(partial(_old_events, limits=limits, run=run))
        if events and not dry_run:
            events = 0
            for start in range(first, upto, EVENTS):
                window = {"run": run, "first": start, "upto": min(start + EVENTS, upto)}
                events += await writer.post(partial(_remove_events, window=window))
        total = _sum(total, Pruned(events=events))
    return total


# -- rollouts --------------------------------------------------------------------------------------


def _page(conn: Connection, limits: Limits, after: int) -> list[tuple[int, str]]:
    columns = {**limits, "after": after, "n": PAGE}
    return [(row["seq"], row["id"]) for row in conn.execute(SQL["prunable"], columns)]


def _evidence(conn: Connection, rollouts: Sequence[str]) -> list[Any]:
    return list(conn.execute(SQL["evidence"], _ids(rollouts)).fetchall())


def _parts(found: Sequence[Any]) -> Iterator[list[str]]:
    """Rollouts that may go in one transaction."""
    part, weight = list[str](), 0
    for row in found:
        size = row["transitions"] + row["spans"]
        if part and weight + size > ROWS:
            yield part
            part, weight = [], 0
        part.append(row["id"])
        weight += size
    if part:
        yield part


def remove(tx: Transaction, rollouts: Sequence[str]) -> Pruned:
    """Those of the rollouts whose group is still at rest: an evaluation may have grown since."""
    tx.conn.execute(SQL["lock_payloads"])
    tx.conn.execute(SQL["lock_groups"], _ids(rollouts))
    found = [row for row in _evidence(tx.conn, rollouts) if row["state"] in AT_REST]
    columns = _ids([row["id"] for row in found])
    hashes = [row["hash"] for row in tx.conn.execute(SQL["tools"], columns)]
    for table in ("credits", "transitions", "spans", "rewards", "attempts", "rollouts"):
        tx.conn.execute(SQL[f"delete_{table}"], columns)
    for digest in hashes:
        tx.conn.execute(SQL["delete_payload"], {"hash": digest})
    # The group of a training rollout stays: it says that it was trained, whoever asks for it again.
    for run, group in sorted(
        {(r["run_id"], r["group_id"]) for r in found if r["purpose"] == "eval"}
    ):
        tx.conn.execute(SQL["delete_group"], {"run": run, "group": group})
    for run in sorted({row["run_id"] for row in found}):
        tx.add_event(run, "run", run)
    return _pruned(found)


def _pruned(found: Sequence[Any]) -> Pruned:
    names = ("attempts", "transitions", "spans", "rewards", "bytes")
    return Pruned(rollouts=len(found), **{name: sum(row[name] for row in found) for name in names})


def _sum(one: Pruned, other: Pruned) -> Pruned:
    names = Pruned.__struct_fields__
    return Pruned(**{name: getattr(one, name) + getattr(other, name) for name in names})


def _ids(rollouts: Sequence[str]) -> dict[str, str]:
    return {"rollouts": rows.to_json(rollouts, "Rollouts")}


# -- events ----------------------------------------------------------------------------------------


def _runs(conn: Connection, limits: Limits) -> list[str]:
    return [row["id"] for row in conn.execute(SQL["runs"], {"run": limits["run"]})]


def _old_events(conn: Connection, limits: Limits, run: str) -> tuple[int, int, int]:
    """Cursor before which events may be removed, the first of them, and their number. The event at
    that cursor stays, so that the newest cursor never shrinks."""
    upto = conn.execute(SQL["old_events"], {**limits, "run": run}).fetchone()["upto"]
    if upto is None:
        return 0, 0, 0
    row = conn.execute(SQL["count_events"], {"run": run, "upto": upto}).fetchone()
    return upto, row["first"] or 0, row["n"]


def _remove_events(tx: Transaction, window: dict[str, Any]) -> int:
    return tx.conn.execute(SQL["delete_events"], window).rowcount
