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
    state, candidates = await _candidates(store, run)
    rows = nested([*candidates.values()], lambda candidate: next(iter(candidate.parents), ""))
    return {"run": run, "rows": rows, "known": candidates} | await _scored_groups(store, state)


async def compared(store: Store, run: str, id: str) -> Values:
    """The texts of a candidate as a diff against its parent's."""
    state, candidates = await _candidates(store, run)
    if (candidate := candidates.get(id)) is None:
        raise NotFound(f"run {run!r} has no candidate {id!r}")
    parent = candidates.get(next(iter(candidate.parents), ""), candidate)
    pairs = zip(parent.texts, candidate.texts, strict=False)
    texts = [(new, changes(old.text, new.text)) for old, new in pairs]
    reflections = await reflections_of(store, run)
    reflections = [row for row in reflections if row.id == candidate.reflection]
    values = {"run": run, "one": candidate, "parent": parent, "texts": texts, "asked": reflections}
    return values | await _scored_groups(store, state)


async def _candidates(store: Store, run: str) -> tuple[RunState, dict[str, Candidate]]:
    if (state := await store.run(run)) is None:
        raise NotFound(f"there is no run {run!r} in this store")
    return state, {candidate.id: candidate for candidate in await candidates_of(store, run)}


async def _scored_groups(store: Store, state: RunState) -> Values:
    """(candidate, kind) -> the groups with which searches scored candidates."""
    prefix, settings = f"{state.run}/prompts/", state.config.get("prompts") or {}
    filters: Any = {"purpose": Purpose.EVAL, "before": f"{state.run}/prompts0"}
    scored: dict[tuple[str, str], list[GroupRow]] = {}
    for group in await store.groups(state.run, limit=SHOWN_GROUPS, **filters):
        if group.id.startswith(prefix):
            search, _, name = group.id.removeprefix(prefix).partition("/")
            kind = "validation" if group.n == settings.get("validation") else "minibatch"
            key = (name.rpartition(".")[2], search if search == "heldout" else kind)
            scored.setdefault(key, []).append(group)
    return {"found": scored}


VERSIONS, EVENTS = 24, 60  # newest versions and events that are shown
MIN_WIDTH_PERCENT = 0.4  # minimum width of a phase


class Phase(NamedTuple):
    """A period in which a version answered sessions, in percent of the run's time."""

    lane: str  # candidate or serving
    start: float
    width: float


class VersionRow(NamedTuple):
    version: int
    made: Version | None
    state: str  # serving, candidate, served before, or the last decision
    share: float  # of new sessions
    phases: list[Phase]
    last: Event | None  # the last decision about it
    compared: Compared | None  # with the version that served while it was a candidate


async def decided(store: Store, run: str) -> dict[str, Any]:
    """The versions of a live run, and the last decisions about them."""
    if (state := await store.run(run)) is None:
        raise NotFound(f"there is no run {run!r} in this store")
    live, now = await live_state(store, run), time.time()
    rows = rows_of(live, now)
    candidate = None if live.lanes is None else live.lanes.candidate
    current = None if candidate is None else live.compared.get(candidate)
    values = {"run": run, "known": live, "lanes": live.lanes, "now": now, "current": current}
    values |= {"rows": rows[:VERSIONS], "more": max(len(rows) - VERSIONS, 0)}
    values["wishes"] = unmet(live)
    values |= {"events": live.events[::-1][:EVENTS], "bar": bar_of(current)}
    promotion = (state.config.get("live") or {}).get("promotion") or {}
    values["sure"] = 1 - float(promotion.get("alpha", PromotionConfig().alpha))
    values["began"] = live.events[0].time if live.events else now
    return values


def rows_of(live: LiveState, now: float) -> list[VersionRow]:
    """A row for each version, the newest first."""
    phases_of, last = phases(live.events, now), {event.version: event for event in live.events}
    numbers = sorted({*live.versions, *last}, reverse=True)
    return [
        VersionRow(
            number,
            live.versions.get(number),
            *_state(live, number, last.get(number)),
            phases_of.get(number, []),
            last.get(number),
            live.compared.get(number),
        )
        for number in numbers
    ]


def phases(events: Sequence[Event], now: float) -> dict[int, list[Phase]]:
    """Version -> when it served. A clock that was set back does not turn time around."""
    times = [event.time for event in events] + [now]
    for at in range(1, len(times)):
        times[at] = max(times[at], times[at - 1])
    whole = max(times[-1] - times[0], 1e-6)
    by_version: dict[int, list[Phase]] = {}
    for event, start, end in zip(events, times[:-1], times[1:], strict=True):
        lanes = {event.lanes.serving: "serving"}
        if event.lanes.candidate is not None:
            lanes[event.lanes.candidate] = "candidate"
        for version, lane in lanes.items():
            left, width = (100 * span / whole for span in (start - times[0], end - start))
            phase = Phase(lane, left, max(width, MIN_WIDTH_PERCENT))
            _add(by_version.setdefault(version, []), phase)
    return by_version


def bar_of(comparison: Compared | None) -> dict[str, float | str] | None:
    """The interval of the difference on an axis of 300 units around zero, and its conclusion."""
    if comparison is None or comparison.high - comparison.low >= 2:
        return None
    bound = max(abs(comparison.low), abs(comparison.high), 0.1)
    left, right = (150 + 145 * end / bound for end in (comparison.low, comparison.high))
    shows = "better" if comparison.low > 0 else "worse" if comparison.high < 0 else ""
    return {"x": left, "width": max(right - left, 3.0), "shows": shows}


def _add(earlier: list[Phase], new: Phase) -> None:
    """Add a phase; adjacent phases in the same lane are joined."""
    if earlier:
        last = earlier[-1]
        if last.lane == new.lane and last.start + last.width >= new.start - 1e-9:
            earlier.pop()
            new = Phase(new.lane, last.start, new.start + new.width - last.start)
    earlier.append(new)


def _state(live: LiveState, version: int, last: Event | None) -> tuple[str, float]:
    """The current state of a version, and its share of new sessions."""
    lanes = live.lanes
    if lanes is not None and version == lanes.serving:
        return "serving", 1.0 if lanes.candidate is None else 1 - lanes.share
    if lanes is not None and version == lanes.candidate:
        return "candidate", lanes.share
    if lanes is not None and version == lanes.previous:
        return "served before", 0.0
    ended = {"promoted": "replaced", "first": "replaced", "candidate": "not compared any more"}
    return ended.get(last.kind, last.kind) if last else "offered", 0.0
