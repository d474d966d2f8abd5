"""Upkeep: what a store holds, and removing what no step will ever read again.

Always true: a rollout goes whole, with everything its attempts left, in one transaction, so that
nobody meets half of one; a transaction removes about `ROWS` rows, so that other writers wait for
milliseconds; the counters, steps and metrics of a run stay what they were. A prune that is killed
has pruned less; the next one goes on.
"""

from __future__ import annotations

import math
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol, TypeVar

from agentrl.errors import Invalid
from agentrl.store import rows, runs
from agentrl.store.database import Connection, load_sql
from agentrl.store.writer import Transaction, WriteVerb
from agentrl.types import Pruned, Stats

SQL = load_sql("maintenance")
FEED = load_sql("feed")
ROWS = 1000  # transitions and spans that one transaction removes, if no rollout alone has more
PAGE = 256  # rollouts looked at with one read
EVENTS = 10_000  # cursor numbers that one transaction passes over
AT_REST = ("trained", "discarded", "settled")  # groups that nobody trains any more
T = TypeVar("T")


class ExecuteRead(Protocol):
    def __call__(self, query: Callable[[Connection], T], /) -> Awaitable[T]: ...


class ExecuteWrite(Protocol):
    def __call__(self, verb: WriteVerb[T], /) -> Awaitable[T]: ...


@dataclass(frozen=True, slots=True)
class PruneLimits:
    """What may go. `keep` committed steps stay, and all that ended after `before`, unix seconds."""

    run: str | None
    keep: int
    before: float

    @property
    def columns(self) -> dict[str, Any]:
        return {"run": self.run, "keep": self.keep, "before": self.before}


def limits(
    now: float, run: str | None, keep_last: int | None, older_than: float | None
) -> PruneLimits:
    """Raises Invalid for limits that would remove everything or make no sense."""
    if keep_last is None and older_than is None:
        raise Invalid(
            "Say what to keep: the steps of keep_last, the seconds of older_than or both."
        )
    if keep_last is not None and keep_last < 0:
        raise Invalid(f"keep_last is a number of steps, not {keep_last}.")
    if older_than is not None and not 0 <= older_than < math.inf:
        raise Invalid(f"older_than is a number of seconds, not {older_than}.")
    before = now if older_than is None else now - older_than
    return PruneLimits(run, keep_last or 0, math.inf if older_than is None else before)


def stats(conn: Connection) -> Stats:
    size = conn.execute(SQL["size"]).fetchone()
    return Stats(
        rows={row["name"]: row["n"] for row in conn.execute(SQL["rows"])},
        bytes=size["bytes"],
        free=size["free"],
        cursor=conn.execute(FEED["cursor"]).fetchone()[0],
    )


async def prune(
    read: ExecuteRead, write: ExecuteWrite, limits: PruneLimits, *, dry_run: bool
) -> Pruned:
    """`read` and `write` each run a function in a transaction of its own."""
    total, after = Pruned(), -1
    await read(partial(_check_run, limits=limits))
    while page := await read(partial(_page, limits=limits, after=after)):
        after = page[-1][0]
        found = await read(partial(_evidence, rollouts=[id for _, id in page]))
        if dry_run:
            total = _sum([total, _pruned(found)])
        else:
            for part in _parts(found):
                total = _sum([total, await write(partial(remove, rollouts=part))])
    for run in await read(partial(_runs, limits=limits)):
        events = await _prune_events(read, write, limits, run, dry_run=dry_run)
        total = _sum([total, Pruned(events=events)])
    return total


# -- rollouts --------------------------------------------------------------------------------------


def _check_run(conn: Connection, limits: PruneLimits) -> None:
    if limits.run is not None:
        runs.find_run(conn, limits.run)


def _page(conn: Connection, limits: PruneLimits, after: int) -> list[tuple[int, str]]:
    columns = {**limits.columns, "after": after, "n": PAGE}
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


def _sum(parts: Sequence[Pruned]) -> Pruned:
    names = Pruned.__struct_fields__
    return Pruned(**{name: sum(getattr(part, name) for part in parts) for name in names})


def _ids(rollouts: Sequence[str]) -> dict[str, str]:
    return {"rollouts": rows.to_json(rollouts, "Rollouts")}


# -- events ----------------------------------------------------------------------------------------


def _runs(conn: Connection, limits: PruneLimits) -> list[str]:
    return [row["id"] for row in conn.execute(SQL["runs"], {"run": limits.run})]


async def _prune_events(
    read: ExecuteRead, write: ExecuteWrite, limits: PruneLimits, run: str, *, dry_run: bool
) -> int:
    """How many. The event before which all goes stays, so that the newest cursor never shrinks."""
    upto, first, n = await read(partial(_old_events, limits=limits, run=run))
    if dry_run or not n:
        return n
    removed = 0
    for start in range(first, upto, EVENTS):
        window = {"run": run, "first": start, "upto": min(start + EVENTS, upto)}
        removed += await write(partial(_remove_events, window=window))
    return removed


def _old_events(conn: Connection, limits: PruneLimits, run: str) -> tuple[int, int, int]:
    """Cursor before which events may go, the first of them, and their number."""
    upto = conn.execute(SQL["old_events"], {**limits.columns, "run": run}).fetchone()["upto"]
    if upto is None:
        return 0, 0, 0
    row = conn.execute(SQL["count_events"], {"run": run, "upto": upto}).fetchone()
    return upto, row["first"] or 0, row["n"]


def _remove_events(tx: Transaction, window: dict[str, Any]) -> int:
    return tx.conn.execute(SQL["delete_events"], window).rowcount
