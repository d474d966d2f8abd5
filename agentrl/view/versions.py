"""The pages of versions: of a live run, and of a search for prompts.

Versions of a live run are shown as lanes with their decisions; a search has a list of candidates,
and a page for each candidate's texts.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any, NamedTuple

from agentrl.algorithms.prompt_search import Candidate, candidates_of, reflections_of
from agentrl.core.config.live import PromotionConfig
from agentrl.core.errors import NotFound
from agentrl.core.types import Purpose, RunState
from agentrl.live.records import Compared, Event, LiveState, Version, live_state, unmet
from agentrl.store.base import Store
from agentrl.store.records import GroupRow
from agentrl.view.records import changes, nested

SHOWN_GROUPS = 500  # newest groups of a search with shown scores
Values = dict[str, Any]


async def searched(store: Store, run: str) -> Values:
    """The candidates of the run's searches, each below its parent."""
    state, known = await _candidates(store, run)
    rows = nested([*known.values()], lambda one: next(iter(one.parents), ""))
    return {"run": run, "rows": rows, "known": known} | await _found(store, state)


async def compared(store: Store, run: str, id: str) -> Values:
    """The texts of a candidate as a diff against its parent's."""
    state, known = await _candidates(store, run)
    if (one := known.get(id)) is None:
        raise NotFound(f"run {run!r} has no candidate {id!r}")
    parent = known.get(next(iter(one.parents), ""), one)
    pairs = zip(parent.texts, one.texts, strict=False)
    texts = [(new, changes(old.text, new.text)) for old, new in pairs]
    asked = [row for row in await reflections_of(store, run) if row.id == one.reflection]
    values = {"run": run, "one": one, "parent": parent, "texts": texts, "asked": asked}
    return values | await _found(store, state)


async def _candidates(store: Store, run: str) -> tuple[RunState, dict[str, Candidate]]:
    if (state := await store.run(run)) is None:
        raise NotFound(f"there is no run {run!r} in this store")
    return state, {one.id: one for one in await candidates_of(store, run)}


async def _found(store: Store, state: RunState) -> Values:
    """(candidate, kind) -> the groups with which searches scored candidates."""
    prefix, settings = f"{state.run}/prompts/", state.config.get("prompts") or {}
    given: Any = {"purpose": Purpose.EVAL, "before": f"{state.run}/prompts0"}
    found: dict[tuple[str, str], list[GroupRow]] = {}
    for group in await store.groups(state.run, limit=SHOWN_GROUPS, **given):
        if group.id.startswith(prefix):
            search, _, name = group.id.removeprefix(prefix).partition("/")
            kind = "validation" if group.n == settings.get("validation") else "minibatch"
            key = (name.rpartition(".")[2], search if search == "heldout" else kind)
            found.setdefault(key, []).append(group)
    return {"found": found}


VERSIONS, EVENTS = 24, 60  # newest versions and events that are shown
MIN_WIDTH_PERCENT = 0.4  # minimum width of a phase


class Phase(NamedTuple):
    """A time in which a version served, in percent of the run's."""

    lane: str  # candidate or serving
    start: float
    width: float


class VersionRow(NamedTuple):
    version: int
    made: Version | None
    state: str  # serving, candidate, before, or the last decision
    share: float  # of new sessions
    phases: list[Phase]
    last: Event | None  # the last decision about it
    compared: Compared | None  # with the version that served while it was a candidate


async def decided(store: Store, run: str) -> dict[str, Any]:
    """The versions of a live run, and the last decisions about them."""
    if (state := await store.run(run)) is None:
        raise NotFound(f"there is no run {run!r} in this store")
    known, now = await live_state(store, run), time.time()
    rows = rows_of(known, now)
    candidate = None if known.lanes is None else known.lanes.candidate
    current = None if candidate is None else known.compared.get(candidate)
    values = {"run": run, "known": known, "lanes": known.lanes, "now": now, "current": current}
    values |= {"rows": rows[:VERSIONS], "more": max(len(rows) - VERSIONS, 0)}
    values["wishes"] = unmet(known)
    values |= {"events": known.events[::-1][:EVENTS], "bar": bar_of(current)}
    promotion = (state.config.get("live") or {}).get("promotion") or {}
    values["sure"] = 1 - float(promotion.get("alpha", PromotionConfig().alpha))
    values["began"] = known.events[0].time if known.events else now
    return values


def rows_of(known: LiveState, now: float) -> list[VersionRow]:
    """A row for each version, the newest first."""
    found, last = phases(known.events, now), {event.version: event for event in known.events}
    numbers = sorted({*known.versions, *last}, reverse=True)
    return [
        VersionRow(
            number,
            known.versions.get(number),
            *_state(known, number, last.get(number)),
            found.get(number, []),
            last.get(number),
            known.compared.get(number),
        )
        for number in numbers
    ]


def phases(events: Sequence[Event], now: float) -> dict[int, list[Phase]]:
    """Version -> when it served. A clock that was set back does not turn time around."""
    times = [event.time for event in events] + [now]
    for at in range(1, len(times)):
        times[at] = max(times[at], times[at - 1])
    whole = max(times[-1] - times[0], 1e-6)
    found: dict[int, list[Phase]] = {}
    for event, start, end in zip(events, times[:-1], times[1:], strict=True):
        lanes = {event.lanes.serving: "serving"}
        if event.lanes.candidate is not None:
            lanes[event.lanes.candidate] = "candidate"
        for version, lane in lanes.items():
            left, width = (100 * span / whole for span in (start - times[0], end - start))
            _add(found.setdefault(version, []), Phase(lane, left, max(width, MIN_WIDTH_PERCENT)))
    return found


def bar_of(found: Compared | None) -> dict[str, float | str] | None:
    """The interval of the difference on an axis of 300 units around zero, and its conclusion."""
    if found is None or found.high - found.low >= 2:
        return None
    most = max(abs(found.low), abs(found.high), 0.1)
    left, right = (150 + 145 * end / most for end in (found.low, found.high))
    shows = "better" if found.low > 0 else "worse" if found.high < 0 else ""
    return {"x": left, "width": max(right - left, 3.0), "shows": shows}


def _add(own: list[Phase], new: Phase) -> None:
    """Add a phase; adjacent phases in the same lane are joined."""
    if own and own[-1].lane == new.lane and own[-1].start + own[-1].width >= new.start - 1e-9:
        first = own.pop()
        new = Phase(new.lane, first.start, new.start + new.width - first.start)
    own.append(new)


def _state(known: LiveState, version: int, last: Event | None) -> tuple[str, float]:
    """The current state of a version, and its share of new sessions."""
    lanes = known.lanes
    if lanes is not None and version == lanes.serving:
        return "serving", 1.0 if lanes.candidate is None else 1 - lanes.share
    if lanes is not None and version == lanes.candidate:
        return "candidate", lanes.share
    if lanes is not None and version == lanes.previous:
        return "served before", 0.0
    ended = {"promoted": "replaced", "first": "replaced", "candidate": "not compared any more"}
    return ended.get(last.kind, last.kind) if last else "offered", 0.0
