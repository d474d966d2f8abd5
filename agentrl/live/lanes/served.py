"""The sessions of each version, in the order in which they began.

What is known early differs from what is known late: a user who complains does so at once, a session
that goes wrong may end sooner. So a session counts with what is known when its wait has passed,
whenever something was said, and only once all that began before it count too, except for those that
take longer than `HELD` times `live.idle`. Then each look sees all sessions up to some time,
whatever became of them, and a young version is compared like an old one. Complaints also count by
themselves, those of the first seconds: there too all versions have had the same time.

A session is read while it is in progress, once it has ended, and in the step that trained it; at
the first look also one that was discarded, as all of a candidate are that was offered by hand. Kept
are those of the versions that serve, as far as something is still decided by them.
"""

from __future__ import annotations

import math
from collections import defaultdict, deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from agentrl.config.live import LiveConfig
from agentrl.live.lanes.comparison import Counted
from agentrl.live.records.documents import Lanes, Told, served
from agentrl.live.records.marks import known_end, mark_of, outcome_of
from agentrl.store.base import Store
from agentrl.types import SESSION, Purpose, Rollout, RolloutState

HELD = 5  # times of `live.idle` for which a session that is not settled holds back later ones
EARLY = 30.0  # seconds after the end of a session until which its user may complain at once
NEWEST = 50  # ended sessions of a version whose calls are looked at
BEGAN = "began"  # key of a task


@dataclass(frozen=True, slots=True)
class ServedSession:
    """A session whose outcome is settled. What is said of it later changes no comparison."""

    rollout: str
    version: int
    lane: str  # in which it began: serving or candidate
    rival: int | None  # the candidate at that time
    share: float  # the probability with which it was drawn for that
    began: float  # unix seconds
    outcome: float  # NaN: nothing was known
    early: float  # see `early_of`
    signals: dict[str, float]


@dataclass(slots=True)
class ServedSessions:
    """Those of one run."""

    store: Store
    run: str
    live: LiveConfig
    known: dict[int, list[ServedSession]] = field(default_factory=lambda: defaultdict(list))
    newest: dict[int, deque[Rollout]] = field(  # ended ones, also without an outcome
        default_factory=lambda: defaultdict(partial(deque, maxlen=NEWEST))
    )
    recent: dict[str, Rollout] = field(default_factory=dict)  # in progress, or ended since
    _open: dict[str, Rollout] = field(default_factory=dict)  # not settled
    _seen: dict[str, int] = field(default_factory=dict)  # settled -> the last look that found it
    _step: int = 0  # sessions that earlier steps trained are known
    _looks: int = 0
    _now: float = 0.0

    async def read(self, now: float, told: Told) -> None:
        """Find what is new. now: unix seconds. The queries are in the order in which a session goes
        through them, so that none is missed."""
        if (lanes := told.lanes) is None:
            return
        first = not self._looks
        given: dict[str, Any]
        rows: list[Rollout] = []
        for given in (
            {"state": RolloutState.RUNNING, "purpose": Purpose.TRAIN},
            {"group_state": "settled"},
            {"group_state": "claimed"},
        ):
            rows += await self.store.rollouts(self.run, **given)
        state = await self.store.run(self.run)
        self.see(rows, now, lanes)
        if first:
            self._take(await self.store.rollouts(self.run, group_state="discarded"), lanes)
        steps = state.step if state else 0
        for step in range(max(self._step, first_step(told, lanes)), steps):
            self._take(await self.store.rollouts(self.run, trained=step), lanes)
            self._step = step + 1

    def see(self, rows: Iterable[Rollout], now: float, lanes: Lanes) -> None:
        """Take into account what was found: `rows` are all that no step has trained."""
        self._now, self._looks = now, self._looks + 1
        sessions = [row for row in rows if row.step == SESSION and row.purpose is Purpose.TRAIN]
        self.recent = {row.id: row for row in sessions}
        before, self._open = self._open, {}
        self._take((before | self.recent).values(), lanes)
        found = dict.fromkeys(self._seen.keys() & self.recent.keys(), self._looks)
        self._seen |= found  # a row may be missed by one look, while its group is released
        self._seen = {id: look for id, look in self._seen.items() if look >= self._looks - 1}

    def _take(self, rows: Iterable[Rollout], lanes: Lanes) -> None:
        for row in rows:
            if row.id not in self._seen and row.task.get("version") in served(lanes):
                self._sort(row)
        self._trim(lanes)

    def _sort(self, row: Rollout) -> None:
        """Whether a session is settled."""
        labelled = is_labelled(row)
        if labelled and self._had_time(row, self.live.wait):
            self._add(row)
        elif labelled or row.id in self.recent:  # others were deleted
            self._open[row.id] = row

    def _add(self, row: Rollout) -> None:
        self._seen[row.id], task = self._looks, row.task
        self.newest[task["version"]].append(row)
        mark = mark_of(row)
        session = ServedSession(
            rollout=row.id,
            version=task["version"],
            lane=task.get("lane", "serving"),
            rival=task.get("candidate"),
            share=task.get("share", 0.0),
            began=began_of(row, self._now),
            outcome=outcome_of(row),
            early=early_of(row),
            signals=mark.signals if mark else {},
        )
        self.known[session.version].append(session)

    def _trim(self, lanes: Lanes) -> None:
        """Keep what is still decided on: sessions of a comparison, and those that the guard takes,
        the first ones of a version and the newest ones."""
        for version in {*self.known, *self.newest} - served(lanes):
            self.known.pop(version, None)
            self.newest.pop(version, None)
        most = self.live.guard.sessions
        for version, sessions in self.known.items():
            sessions.sort(key=lambda one: one.began)
            judged = [one for one in sessions if not math.isnan(one.outcome)]
            kept = {one.rollout for one in judged if one.rival == lanes.candidate is not None}
            for some in (sessions, judged):
                first = [one for one in some if one.lane == "serving"][:most]
                kept |= {one.rollout for one in [*first, *some[-most:]]}
            self.known[version] = [one for one in sessions if one.rollout in kept]

    def compared(self, candidate: int, serving: int) -> list[ServedSession]:
        """The sessions with a known outcome that were drawn for one of two lanes, as they began."""
        ours = [one for one in self.known[candidate] if one.lane == "candidate"]
        theirs = [one for one in self.known[serving] if one.lane == "serving"]
        drawn = [one for one in ours + theirs if one.rival == candidate and 0 < one.share < 1]
        drawn = [one for one in drawn if not math.isnan(one.outcome)]
        alike = [row for row in self._open.values() if row.task.get("candidate") == candidate]
        end = self._end(alike, self.live.wait)
        return sorted((one for one in drawn if one.began < end), key=lambda one: one.began)

    def outcomes(self, version: int, *, lane: str = "", early: bool = False) -> list[float]:
        """Known outcomes of a version, oldest first. early: what `early_of` says of its sessions,
        also of those of which more may become known."""
        sessions = [one for one in self.known[version] if not lane or one.lane == lane]
        found = [(one.began, one.early if early else one.outcome) for one in sessions]
        left = [row for row in self._open.values() if is_of(row, version, lane)]
        if early:
            over = [row for row in left if is_labelled(row) and self._had_time(row, EARLY)]
            found += [(began_of(row, self._now), early_of(row)) for row in over]
            left = [row for row in left if row not in over]
        end = self._end(left, EARLY if early else self.live.wait)
        return [value for began, value in sorted(found) if began < end and not math.isnan(value)]

    def _had_time(self, row: Rollout, seconds: float) -> bool:
        return known_end(row) + seconds <= self._now

    def _end(self, left: Iterable[Rollout], wait: float) -> float:
        """When the first session began of those that are not settled, and hold back later ones."""
        oldest = self._now - wait - HELD * self.live.idle
        begun = [began_of(row, self._now) for row in left]
        return min((began for began in begun if began >= oldest), default=math.inf)


def is_labelled(row: Rollout) -> bool:
    return row.state.terminal and mark_of(row) is not None


def began_of(row: Rollout, now: float) -> float:
    """When a session began, in unix seconds; now: if it is unknown and has not ended."""
    known = row.task.get(BEGAN)
    if isinstance(known, int | float):
        return float(known)
    ended = known_end(row)
    return ended - row.seconds if ended else now


def early_of(row: Rollout) -> float:
    """The outcome of a session whose user said something within `EARLY` seconds of its end, else 1:
    nobody has complained."""
    mark, outcome = mark_of(row), outcome_of(row)
    if mark is None or not mark.explicit or math.isnan(outcome):
        return 1.0
    soon = any(mark.delays.get(name, 0.0) <= EARLY for name in mark.posted)
    return outcome if soon else 1.0


def first_step(told: Told, lanes: Lanes) -> int:
    """The first step that may have trained sessions of the versions in the lanes."""
    versions = [told.versions[one] for one in served(lanes) if one in told.versions]
    return min((one.step for one in versions), default=0)


def counted(sessions: list[ServedSession], candidate: int) -> list[Counted]:
    return [Counted(one.version == candidate, one.outcome, one.share) for one in sessions]


def is_of(row: Rollout, version: int, lane: str) -> bool:
    return row.task.get("version") == version and (not lane or row.task.get("lane") == lane)
