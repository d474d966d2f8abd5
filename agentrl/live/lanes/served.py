"""The sessions of each version, in the order in which their outcomes became known.

A session is read while it is in progress, once it has ended, and in the step that trained it; never
all of them, except once when the process starts.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import AsyncIterator
from dataclasses import dataclass, field

from agentrl.live.lanes.comparison import Counted
from agentrl.live.records.marks import is_ready, mark_of, outcome_of
from agentrl.store.base import Store
from agentrl.types import SESSION, Purpose, Rollout, RolloutState

PAGE = 500  # sessions that are read at once


@dataclass(frozen=True, slots=True)
class ServedSession:
    """A session whose outcome is settled. What is said of it later changes no comparison."""

    rollout: str
    version: int
    lane: str  # in which it began: serving or candidate
    rival: int | None  # the candidate at that time
    share: float  # the probability with which it was drawn for that
    outcome: float  # NaN: nothing was known when it was trained
    signals: dict[str, float]


@dataclass(slots=True)
class ServedSessions:
    """Those of one run."""

    store: Store
    run: str
    wait: float  # seconds for explicit feedback, see `marks.is_ready`
    known: dict[int, list[ServedSession]] = field(default_factory=lambda: defaultdict(list))
    recent: dict[str, Rollout] = field(default_factory=dict)  # in progress, or ended since
    _order: dict[str, int] = field(default_factory=dict)  # rollout -> when it became known
    _step: int | None = None  # sessions that earlier steps trained are known; None: nothing is

    async def read(self, now: float) -> None:
        """Find what is new. now: unix seconds."""
        state = await self.store.run(self.run)
        steps = state.step if state else 0
        rows = [row async for row in self._rows(steps)]
        running = await self.store.rollouts(
            self.run, purpose=Purpose.TRAIN, state=RolloutState.RUNNING
        )
        self.recent = {row.id: row for row in [*running, *rows] if row.step == SESSION}
        for row in rows:
            over = row.trained is not None or is_ready(row, now, self.wait)
            if row.id not in self._order and over:
                self._add(row)
        self._step = steps

    async def _rows(self, steps: int) -> AsyncIterator[Rollout]:
        """All ended sessions at first; then those not trained, and those of new steps."""
        if self._step is None:
            after: str | None = None
            while rows := await self.store.rollouts(
                self.run, purpose=Purpose.TRAIN, step=SESSION, after=after, limit=PAGE
            ):
                for row in rows:
                    yield row
                after = rows[-1].id
            return
        for row in await self.store.rollouts(self.run, group_state="settled"):
            yield row
        for step in range(self._step, steps):
            for row in await self.store.rollouts(self.run, trained=step):
                yield row

    def _add(self, row: Rollout) -> None:
        self._order[row.id] = len(self._order)
        mark, task = mark_of(row), row.task
        if "version" not in task:
            return
        session = ServedSession(
            rollout=row.id,
            version=task["version"],
            lane=task.get("lane", "serving"),
            rival=task.get("candidate"),
            share=task.get("share", 0.0),
            outcome=outcome_of(row),
            signals=mark.signals if mark else {},
        )
        self.known[session.version].append(session)

    def compared(self, candidate: int, serving: int) -> list[ServedSession]:
        """The sessions of two lanes that were drawn for one or the other, as they became known."""
        ours = [one for one in self.known[candidate] if one.lane == "candidate"]
        theirs = [one for one in self.known[serving] if one.lane == "serving"]
        drawn = [one for one in ours + theirs if one.rival == candidate and 0 < one.share < 1]
        return sorted(drawn, key=lambda one: self._order[one.rollout])

    def outcomes(self, version: int, *, lane: str = "") -> list[float]:
        """Known outcomes of a version, oldest first."""
        rows = (one for one in self.known[version] if not lane or one.lane == lane)
        return [one.outcome for one in rows if not math.isnan(one.outcome)]


def counted(sessions: list[ServedSession], candidate: int) -> list[Counted]:
    return [Counted(one.version == candidate, one.outcome, one.share) for one in sessions]
