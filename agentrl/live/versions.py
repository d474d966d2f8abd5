"""The versions of a live run: made, served and dropped by the algorithm process.

Owns the folders `<output>/versions/<policy>-<version>`, each a checkpoint without the run's state,
and what is served of them. Always true: a folder is complete once it exists, and a version is
announced in the store once it is served; the learner goes on from the serving version after a
decision against one of its own.
"""

from __future__ import annotations

import asyncio
import logging
import time
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, field
from math import ceil, inf
from pathlib import Path

import msgspec

from agentrl.algorithms.train.checkpoint import save_checkpoint
from agentrl.algorithms.train.hooks import ServedRun
from agentrl.base.files import delete_directory
from agentrl.base.processes import log_phase
from agentrl.errors import DamagedError, PolicyError
from agentrl.live.records import documents
from agentrl.live.records.documents import (
    Event,
    Lanes,
    Told,
    Version,
    VersionKind,
    put_version,
    put_wish,
    told,
)
from agentrl.live.records.table import policy_of
from agentrl.store.base import Store
from agentrl.types import EMPTY, POLICY, Json, PolicyVersion

log = logging.getLogger("agentrl.algorithm")
FOLDER = "versions"
GIVEN = 1_000_000  # number of the first version that a user offers by hand
GRACE = 3.0  # seconds until nobody calls a version any longer that is in no lane
KEPT = 5  # folders of versions that served, to which a user can roll back


class Reset(msgspec.Struct, frozen=True, array_like=True):
    """When its policy had `at` updates, the learner went on from the weights of a version."""

    at: int
    version: int


@dataclass(slots=True)
class Lineage:
    """From which versions the learner's weights come; a part of the run's state."""

    resets: list[Reset] = field(default_factory=list)
    decided: int = 0  # number of events that it has heeded
    # Steps that trained nothing, and so made no update; the store has them, not the run's state.
    empty: list[int] = field(default_factory=list)
    read: int = 0  # steps of which that is known

    def lag(self, version: int, now: int) -> float:
        """The number of updates from a version to the policy after `now` updates; inf if it is not
        on the way."""
        return self._lag(version, now, self.resets)

    def _lag(self, version: int, now: int, resets: list[Reset]) -> float:
        if not resets:
            return self._updates(version, now) if version <= now else inf
        last = resets[-1]
        if last.at < version <= now:
            return self._updates(version, now)
        earlier = [reset for reset in resets[:-1] if reset.at < last.version]
        return self._updates(last.at, now) + self._lag(version, last.version, earlier)

    def _updates(self, since: int, now: int) -> int:
        return now - since - (bisect_left(self.empty, now) - bisect_left(self.empty, since))

    async def read_empty(self, store: Store, run: str, steps: int) -> None:
        """Find out which of the first `steps` steps trained nothing."""
        rows = await store.steps(run, after=self.read - 1) if steps > self.read else []
        self.empty += [row.step for row in rows if row.step < steps and EMPTY in row.metrics]
        self.read = max(self.read, steps)

    def dump(self) -> Json:
        return {"resets": msgspec.to_builtins(self.resets), "decided": self.decided}

    def restore(self, data: Json) -> None:
        self.resets = msgspec.convert(data["resets"], list[Reset])
        self.decided = msgspec.convert(data["decided"], int)


@dataclass(slots=True)
class Versions:
    """What `tend` keeps as the lanes say. lineage: of the learner."""

    run: ServedRun
    lineage: Lineage
    unwanted: dict[int, float] = field(default_factory=dict)  # since when, of those still served
    served: set[int] = field(default_factory=set)
    lanes: Lanes | None = None  # at the last `tend`

    async def start(self) -> None:
        """Serve the versions of the lanes, or the first one. Raises PolicyError if the weights of
        the serving one are missing."""
        known = await self._told()
        await self._reserve()
        if not known.versions:
            await self.offer(self.run.state.step, "first")
        else:
            await self._serve(known)
            await self._announce()

    async def tend(self, step: int) -> None:
        """Do what was decided since the last call: serve what the lanes say, go on from the serving
        version, or offer the newest one. step: the number of steps that are committed."""
        known = await self._told()
        self.lanes = known.lanes
        if known.lanes is None:
            return
        now = self.run.policies.versions(step)[POLICY]
        await self.lineage.read_empty(self.run.store, self.run.config.name, step)
        await self._heed(known, now)
        await self._serve(known)
        await self._offer_wished(known, step)
        if known.lanes.candidate is None and not pending(known):
            trained = self.lineage.lag(known.lanes.serving, now) > 0
            if trained and now not in known.versions:
                await self.offer(step, "trained")
        await self._announce()

    def ahead(self, step: int) -> float:
        """Updates of the learner since the version that served at the last `tend`; 0 before there
        was one."""
        if self.lanes is None:
            return 0
        return self.lineage.lag(self.lanes.serving, self.run.policies.versions(step)[POLICY])

    async def offer(self, step: int, kind: VersionKind) -> None:
        """Save and serve the learner's policy after `step` steps, and announce it."""
        version, identity = self.run.policies.versions(step)[POLICY], self.run.state.identity
        path = self.folder(version)
        self.run.lock.check()
        await asyncio.to_thread(save_checkpoint, path, self.run.policies, {}, identity)
        await self._add(version, path, kind, step)

    def folder(self, version: int) -> Path:
        return Path(self.run.config.output, FOLDER, f"{POLICY}-{version}")

    def size(self) -> int:
        """Bytes of the largest version on disk."""
        sizes = [
            sum(file.stat().st_size for file in path.iterdir())
            for path in Path(self.run.config.output, FOLDER).glob("*")
        ]
        return max(sizes, default=0)

    async def _add(self, version: int, path: Path, kind: VersionKind, step: int) -> None:
        await self._freeze(version, path)
        known = await self._told()
        row = Version(
            version=version,
            step=step,
            path=str(
                path.relative_to(self.run.config.output) if kind != "offered by hand" else path
            ),
            offered=time.time(),
            source=known.lanes.serving if known.lanes else None,
            kind=kind,
        )
        await self._announce()
        await put_version(self.run.store, self.run.config.name, row)
        log_phase(log, f"version {version} is offered")

    async def _told(self) -> Told:
        return await told(self.run.store, self.run.config.name)

    async def _freeze(self, version: int, path: Path) -> None:
        async with self.run.serving.updating():
            await self.run.serving.freeze(policy_of(version), path, version)
        self.served.add(version)

    async def _serve(self, known: Told) -> None:
        """Serve exactly the versions of the lanes, and one that is offered."""
        wanted = wanted_of(known)
        for version in sorted(wanted - self.served):
            self.unwanted.pop(version, None)
            await self._freeze(version, self._path(known.versions[version]))
        now = time.monotonic()
        for version in self.served - wanted:
            self.unwanted.setdefault(version, now)
        due = [version for version, since in self.unwanted.items() if since <= now - GRACE]
        for version in due:
            del self.unwanted[version]
            if version in wanted:
                continue
            async with self.run.serving.updating():
                await self.run.serving.drop(policy_of(version))
            self.served.discard(version)
        self._delete_old(known, wanted)

    def _delete_old(self, known: Told, wanted: set[int]) -> None:
        """Delete the folders of versions that no user can want back."""
        served = [one.version for one in known.events if one.kind in ("first", "promoted")]
        kept = wanted | self.served | set(served[-KEPT:]) | {min(known.versions, default=0)}
        for row in known.versions.values():
            own = row.kind != "offered by hand" and row.version not in kept
            if own and self.folder(row.version).is_dir():
                delete_directory(self.folder(row.version))

    def _path(self, version: Version) -> Path:
        return Path(self.run.config.output, version.path)  # an absolute one stays as it is

    async def _announce(self) -> None:
        run = self.run
        await run.serving.announce(run.store, run.config.name, run.state.epoch)

    async def _reserve(self) -> None:
        """Announce the policy without an address, before any version: the gateway then waits for
        the version of each session, which replaces it. An adapter is served itself."""
        run = self.run
        if all(name != POLICY for name, *_ in run.serving.table()):
            name = run.config.name
            row = PolicyVersion(run=name, policy=POLICY, version=0, base_url="", model="")
            await run.store.publish(row, epoch=run.state.epoch)

    async def _heed(self, known: Told, now: int) -> None:
        """Go on from the serving version, if there is a reason to."""
        assert known.lanes is not None
        new = known.events[self.lineage.decided :]
        self.lineage.decided = len(known.events)
        serving = known.lanes.serving
        if not (why := self._why_from_serving(known, now, new)):
            return
        path = self._path(known.versions[serving])
        try:
            await asyncio.to_thread(self.run.policies.load, path)
        except (DamagedError, PolicyError) as error:
            log.warning("the learner does not go on from version %d: %s", serving, error)
            return
        self.lineage.resets.append(Reset(now, serving))
        log_phase(log, f"the learner goes on from version {serving}: {why}")

    def _why_from_serving(self, known: Told, now: int, new: Sequence[Event]) -> str:
        """Why the learner has to go on from the serving version, not from its own weights; empty if
        it has not. new: what was decided since the last call."""
        assert known.lanes is not None
        serving = known.lanes.serving
        lag = self.lineage.lag(serving, now)
        bad = [event.version for event in new if documents.resets(event)]
        derived = [version for version in bad if self.lineage.lag(version, now) < inf]
        if derived and serving not in derived and lag:
            return f"version {derived[-1]} was found bad"
        if lag == inf:
            return "it serves, and the learner comes from another one"
        undecided = known.lanes.candidate is not None or pending(known) or now not in known.versions
        if not undecided and lag >= most_ahead(self.run.config.algorithm.max_staleness):
            return f"{lag:.0f} updates later nothing was decided"
        return ""

    async def _offer_wished(self, known: Told, step: int) -> None:
        """Serve the weights that a user offers."""
        wish = known.wish
        if wish is None or known.lanes is None or pending(known):
            return
        path = Path(wish.path)
        given = [version for version in known.versions if version >= GIVEN]
        try:
            await self._add(max(given, default=GIVEN - 1) + 1, path, "offered by hand", step)
        except (DamagedError, PolicyError, OSError) as error:
            log.warning("%s cannot be offered: %s", path, error)
        await put_wish(self.run.store, self.run.config.name, None)


def pending(known: Told) -> set[int]:
    """The version that is offered next, if nothing is decided about it."""
    newest = documents.newest_offer(known)
    return set() if newest is None else {newest.version}


def wanted_of(known: Told) -> set[int]:
    """The versions to serve: of the lanes, and the one that is offered."""
    if known.lanes is None:
        return set(known.versions)
    wanted = documents.served(known.lanes) | pending(known)
    return {version for version in wanted if version in known.versions}


def most_ahead(staleness: float) -> int:
    """Updates of the learner since the serving version, after which it waits for a decision."""
    return max(1, ceil(staleness))
