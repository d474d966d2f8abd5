"""Decides which version answers sessions: by comparison, by the guard, and by hand.

Everything is read from the store, and a decision is a document, so it holds whatever the algorithm
process is doing. See documents.py for what happens if several decide.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time

from msgspec import to_builtins
from msgspec.structs import replace

from agentrl.config import RunConfig
from agentrl.errors import Conflict
from agentrl.live.lanes import heldout
from agentrl.live.lanes.comparison import difference
from agentrl.live.lanes.guard import Guard
from agentrl.live.lanes.served import ServedSessions, counted
from agentrl.live.lanes.verdict import compared, verdict
from agentrl.live.records import documents
from agentrl.live.records.documents import Event, Lanes, Told, Version
from agentrl.store.base import Store
from agentrl.types import Json

log = logging.getLogger("agentrl.live")
LOOK, LEAST_PAUSE, IDLENESS = 5.0, 0.2, 4.0  # s between looks; at least; pause per time of a look
SHOWN = 2.0  # seconds between two documents of a comparison
KL = ("reference/kl", "reference/drift")  # metrics of a step


async def run(store: Store, config: RunConfig) -> None:
    """Write what is decided, and why, until cancelled. Raises StoreError; call it again then."""
    decider = Decider(store, config)
    while True:
        cursor, began = await store.cursor(), time.monotonic()
        try:
            while event := await decider.look(time.time()):
                log.info("version %d: %s: %s", event.version, event.kind, event.why)
        except Conflict as error:
            log.info("looked again: %s", error)
            continue
        await asyncio.sleep(LEAST_PAUSE + IDLENESS * (time.monotonic() - began))
        await store.wait(cursor, timeout=LOOK)


class Decider:
    """Looks at the sessions of one run."""

    def __init__(self, store: Store, config: RunConfig) -> None:
        self._store, self._run, self._live = store, config.name, config.live
        self._held_out = bool(config.tasks.heldout)
        self._documents = documents.Documents(store, config.name)
        self._served = ServedSessions(store, config.name, self._live)
        self._guard = Guard(store, self._live.guard)
        self._shown = -math.inf  # when a comparison was last written
        self._without_kl = set[int]()

    async def look(self, now: float) -> Event | None:
        """Decide one thing, or nothing. now: unix seconds. Raises Conflict if somebody else decided
        meanwhile."""
        known = await self._documents.told()
        await self._served.read(now, known)
        if known.lanes is not None:
            self._guard.forget(documents.served(known.lanes))
        event = self._begun(known, now) or await self._alarm(known, now)
        event = event or await self._compared(known, now)
        if event:
            await documents.decide(self._store, self._run, known, event)
        return event

    def _begun(self, known: Told, now: float) -> Event | None:
        """The first version, or a new candidate."""
        if (lanes := known.lanes) is None:
            first = min(known.versions, default=None)
            if first is None:
                return None
            lanes = Lanes(serving=first, share=self._live.share)
            why = "the version that the run begins with"
            return Event(time=now, kind="first", version=first, lanes=lanes, why=why)
        if (new := documents.next_offer(known)) is None:
            return None
        by_hand = new.kind == "offered by hand"
        if lanes.candidate is not None and (not by_hand or lanes.candidate >= documents.GIVEN):
            return None  # of what users offer, one is compared after the other
        why = f"made by {new.step} steps" if not by_hand else f"offered by hand: {new.given}"
        if lanes.candidate is not None:
            why += f"; version {lanes.candidate} is not compared any more"
        lanes = replace(lanes, candidate=new.version, share=self._live.share)
        return Event(time=now, kind="candidate", version=new.version, lanes=lanes, why=why)

    async def _alarm(self, known: Told, now: float) -> Event | None:
        """What the guard takes back."""
        if (lanes := known.lanes) is None:
            return None
        if (version := lanes.candidate) is not None:
            back = replace(lanes, candidate=None)
            if event := await self._back(known, version, lanes.serving, "candidate", back, now):
                return event
        if lanes.previous is not None:
            back = lanes.returned()
            return await self._back(known, lanes.serving, lanes.previous, "serving", back, now)
        return None

    async def _back(
        self, known: Told, version: int, other: int, lane: str, back: Lanes, now: float
    ) -> Event | None:
        kl = await self._kl(known.versions.get(version))
        most = self._live.guard.kl
        evidence: dict[str, Json]
        if most is not None and kl > most:
            why = f"{kl:.3g} nats per token from the first version, more than live.guard.kl allows"
            evidence = {"limit": "kl", "kl": kl}
        elif alarm := await self._guard.alarm(self._served, version, other, lane):
            why, evidence = alarm
        else:
            return None
        return Event(
            time=now, kind="taken back", version=version, lanes=back, why=why, worse=True,
            evidence=evidence,
        )  # fmt: skip

    async def _compared(self, known: Told, now: float) -> Event | None:
        """What the comparison of the two lanes, and their held-out scores, say."""
        lanes = known.lanes
        if lanes is None or lanes.candidate is None:
            return None
        sessions = self._served.compared(lanes.candidate, lanes.serving)
        found = difference(counted(sessions, lanes.candidate), self._live.promotion.alpha)
        scores = heldout.comparable(known, lanes.candidate, lanes.serving)
        decided = verdict(self._live.promotion, found, scores if self._held_out else None)
        shown = compared(lanes, found, sessions, scores, now)
        if decided or not 0 <= now - self._shown < SHOWN:
            self._shown = now
            await documents.put_compared(self._store, self._run, shown)
        if decided is None:
            return None
        kind, worse, why = decided
        since = lanes.promoted() if kind == "promoted" else replace(lanes, candidate=None)
        return Event(
            time=now, kind=kind, version=lanes.candidate, lanes=since, why=why, worse=worse,
            evidence=to_builtins(shown),
        )  # fmt: skip

    async def _kl(self, version: Version | None) -> float:
        """Nats per token from the first version, in the step that made this one; NaN: unknown."""
        if self._live.guard.kl is None or version is None or version.kind != "trained":
            return math.nan
        rows = await self._store.steps(self._run, after=version.step - 2, limit=1)
        known = [rows[0].metrics[name] for name in KL if rows and name in rows[0].metrics]
        if not known and version.version not in self._without_kl:
            self._without_kl.add(version.version)
            log.warning(
                "live.guard.kl: the step of version %d has no %s; set the preset's `kl`, or remove "
                "the limit", version.version, " or ".join(KL),
            )  # fmt: skip
        return known[0] if known else math.nan
