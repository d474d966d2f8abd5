"""The page of a live run: its versions as lanes, and what was decided about them."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any, NamedTuple

from agentrl.config.live import PromotionConfig
from agentrl.errors import NotFound
from agentrl.live.records.documents import Compared, Event, Told, Version, told, unmet
from agentrl.store.base import Store

VERSIONS, EVENTS = 24, 60  # newest ones that are shown
NARROWEST = 0.4  # percent of the width that a phase has at least


class Phase(NamedTuple):
    """A time in which a version served, in percent of the run's."""

    lane: str  # candidate or serving
    start: float
    width: float


class VersionRow(NamedTuple):
    version: int
    made: Version | None
    state: str  # serving, candidate, before, or what was decided last
    share: float  # of new sessions
    phases: list[Phase]
    last: Event | None  # the last decision about it
    compared: Compared | None  # with the version that served while it was a candidate


async def decided(store: Store, run: str) -> dict[str, Any]:
    """The versions of a live run, and the last decisions about them."""
    if (state := await store.run(run)) is None:
        raise NotFound(f"there is no run {run!r} in this store")
    known, now = await told(store, run), time.time()
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


def rows_of(known: Told, now: float) -> list[VersionRow]:
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
            _add(found.setdefault(version, []), Phase(lane, left, max(width, NARROWEST)))
    return found


def bar_of(found: Compared | None) -> dict[str, float | str] | None:
    """The interval of the difference on an axis of 300 units around zero, and what it shows."""
    if found is None or found.high - found.low >= 2:
        return None
    most = max(abs(found.low), abs(found.high), 0.1)
    left, right = (150 + 145 * end / most for end in (found.low, found.high))
    shows = "better" if found.low > 0 else "worse" if found.high < 0 else ""
    return {"x": left, "width": max(right - left, 3.0), "shows": shows}


def _add(own: list[Phase], new: Phase) -> None:
    """Join phases in the same lane that follow each other."""
    if own and own[-1].lane == new.lane and own[-1].start + own[-1].width >= new.start - 1e-9:
        first = own.pop()
        new = Phase(new.lane, first.start, new.start + new.width - first.start)
    own.append(new)


def _state(known: Told, version: int, last: Event | None) -> tuple[str, float]:
    """What a version is now, and its share of new sessions."""
    lanes = known.lanes
    if lanes is not None and version == lanes.serving:
        return "serving", 1.0 if lanes.candidate is None else 1 - lanes.share
    if lanes is not None and version == lanes.candidate:
        return "candidate", lanes.share
    if lanes is not None and version == lanes.previous:
        return "served before", 0.0
    ended = {"promoted": "replaced", "first": "replaced", "candidate": "not compared any more"}
    return ended.get(last.kind, last.kind) if last else "offered", 0.0
