"""Groups as lists of them show them: their tasks, and in games what a seat got."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from statistics import fmean
from typing import Any, NamedTuple

from msgspec.structs import replace

from agentrl.store.base import Store
from agentrl.store.records import GroupRow
from agentrl.types import Json, Purpose, Rollout, Scope
from agentrl.view import records

OUTCOME = "outcome"
RECENT = 150  # training groups whose tasks are listed


class Listed(NamedTuple):
    """A group with its task."""

    row: GroupRow
    task: Mapping[str, Json]  # empty if the group is pruned
    seat: str = ""  # whose outcomes these are; empty: those of the rollouts as a whole
    share: bool = True  # whether what its seats got lies in 0 to 1


async def recent(store: Store, run: str) -> list[Listed]:
    """The last training groups."""
    rows = await store.groups(run, purpose=Purpose.TRAIN, limit=RECENT)
    return await listed(store, run, [row for row in rows if row.rollouts])


async def listed(store: Store, run: str, rows: Sequence[GroupRow]) -> list[Listed]:
    return list(await asyncio.gather(*(_listed(store, run, row) for row in rows)))


async def _listed(store: Store, run: str, row: GroupRow) -> Listed:
    first = await store.rollouts(run, group=row.id, limit=1) if row.rollouts else []
    if first and row.step < 0:
        return Listed(row, {"input": await _asked(store, first[0])})
    if not first or len(_seats(first[0])) < 2:
        return Listed(row, first[0].task if first else {})
    every = await store.rollouts(run, group=row.id)
    if not (seat := told_by(every)):
        return Listed(row, first[0].task)
    got = {one.id: _seats(one) for one in every}
    outcomes = [got.get(id, {}).get(seat) for id in row.rollouts]
    share = all(0 <= x <= 1 for seats in got.values() for x in seats.values())
    return Listed(replace(row, outcomes=outcomes), first[0].task, seat, share)


async def _asked(store: Store, session: Rollout) -> str:
    """What a user said first: a session has no task."""
    calls = (await store.calls([session.id])).get(session.id) or []
    said = (one for call in calls[:1] for one in call.messages if one.get("role") == "user")
    return records.gist(next(said, {}).get("content"))


def told_by(rollouts: Sequence[Rollout]) -> str:
    """The first seat of a game in which the outcome of the rollout, the mean of what all seats
    got, is the same whoever wins; empty if the outcome says more than that."""
    games = [seats for one in rollouts if len(seats := _seats(one)) > 1]
    if not any(len({*seats.values()}) > 1 for seats in games):
        return ""
    means = {round(fmean(seats.values()), 6) for seats in games}
    whole = {round(x, 6) for one in rollouts if (x := one.reward()) == x}
    return min(games[0]) if len(means) == 1 and whole <= means else ""


def seats(rollouts: Sequence[Rollout]) -> list[str]:
    """The seats of a game whose outcomes tell more than that of the rollout; else none."""
    return sorted({seat for one in rollouts for seat in _seats(one)}) if told_by(rollouts) else []


def _seats(rollout: Rollout) -> dict[str, float]:
    """What each seat or role got."""
    rows = (row for row in rollout.rewards if row.scope is Scope.ROLE and row.name == OUTCOME)
    return {row.target: row.value for row in rows if row.target}


def values(found: Sequence[Listed], *, percent: bool) -> dict[str, Any]:
    """What templates list. `percent`: whether the scores of the run are percentages."""
    of = {one.row.id: one.seat for one in found if one.seat}
    tasks = [records.gist(one.task) if one.task else "" for one in found]
    percent = percent and all(one.share for one in found)
    shown = {"groups": [one.row for one in found], "percent": percent}
    return shown | {"group_tasks": tasks, "seats": of}
