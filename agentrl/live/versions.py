"""The versions of a live run, which the algorithm process creates, serves and removes. Owns: the
folders `<output>/versions/<policy>-<version>`, each a checkpoint without the run's state, and which
of them are served. Invariant: a folder is complete once it exists, and a version is announced in
the store once it is served; after a decision against a version that it trained, the learner
continues from the serving version, and learns nothing until it does. Offered weights are copied, so
nothing outside of the run's folder is needed later.
"""

from __future__ import annotations

import asyncio
import logging
import os
import shutil
import time
from bisect import bisect_left
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from math import ceil, inf
from pathlib import Path

import msgspec

from agentrl.algorithms.train.checkpoint import save_checkpoint
from agentrl.algorithms.train.features import ServedRun
from agentrl.core.errors import ConfigError, Conflict, PolicyError
from agentrl.core.files import PARTIAL, atomic_directory, delete_directory
from agentrl.core.processes import log_phase
from agentrl.core.types import EMPTY, POLICY, Json, PolicyVersion
from agentrl.live import records
from agentrl.live.records import (
    Documents,
    Event,
    Lanes,
    LiveState,
    Version,
    VersionKind,
    policy_of,
    put_version,
)
from agentrl.store.base import Store

log = logging.getLogger("agentrl.algorithm")
FOLDER = "versions"
GRACE = 3.0  # seconds for which a version that has left all lanes still serves calls in flight
KEPT_VERSIONS = 5  # folders of versions that served, which a user can offer again
# Raised for a folder whose weights cannot be used.
UNUSABLE = (PolicyError, ConfigError, OSError)


class Reset(msgspec.Struct, frozen=True, array_like=True):
    """A reset: after `at` updates of its policy, the learner continued from the weights of a
    version."""

    at: int
    version: int


@dataclass(slots=True)
class Lineage:
    """The versions from which the learner's weights come; a part of the run's state."""

    resets: list[Reset] = field(default_factory=list)
    decided: int = 0  # number of events that have taken effect
    # Steps without an update, because they trained nothing; read from the store, not part of the
    # run's state.
    empty: list[int] = field(default_factory=list)
    read: int = 0  # number of steps that `empty` covers

    def lag(self, version: int, now: int) -> float:
        """The number of updates from a version to the policy after `now` updates; inf if that
        policy does not descend from it."""
        return self._lag(version, now, self.resets)

    def _lag(self, version: int, now: int, resets: list[Reset]) -> float:
        if not resets:
            return self.updates(version, now) if version <= now else inf
        last = resets[-1]
        if last.at < version <= now:
            return self.updates(version, now)
        earlier = [reset for reset in resets[:-1] if reset.at < last.version]
        return self.updates(last.at, now) + self._lag(version, last.version, earlier)

    def updates(self, since: int, now: int) -> int:
        """The number of steps from `since` to `now` that trained something."""
        return now - since - (bisect_left(self.empty, now) - bisect_left(self.empty, since))

    async def read_empty(self, store: Store, run: str, steps: int) -> None:
        """Read which of the first `steps` steps trained nothing."""
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
    """Serves the versions that the lanes name; `tend` carries out the decisions. lineage: of the
    learner."""

    run: ServedRun
    lineage: Lineage
    # Version -> since when it is unwanted but still served.
    unwanted: dict[int, float] = field(default_factory=dict)
    served: set[int] = field(default_factory=set)
    lanes: Lanes | None = None  # at the last `tend`
    blocked: str = ""  # why a required reset to the serving version is impossible
    documents: Documents = field(init=False)

    def __post_init__(self) -> None:
        self.documents = Documents(self.run.store, self.run.config.name)

    async def start(self) -> None:
        """Serve the versions of the lanes, or the first version. Raises PolicyError if the weights
        of the serving version cannot be loaded."""
        state = await self.documents.state()
        await self._reserve()
        if not state.versions:
            await self.offer(self.run.state.step, "first")
        else:
            await self._serve(state)
            await self._announce()

    async def tend(self, step: int) -> None:
        """Carry out the decisions since the last call: serve the versions of the lanes, continue
        from the serving version, or offer the newest one. step: the number of committed steps."""
        state = await self.documents.state()
        self.lanes = state.lanes
        if state.lanes is None:
            return
        now = self.run.policies.versions(step)[POLICY]
        await self.lineage.read_empty(self.run.store, self.run.config.name, step)
        await self._follow_serving(state, now)
        await self._serve(state)
        await self._serve_offered(state, step)
        if state.lanes.candidate is None and not pending(state) and not self.blocked:
            trained = self.lineage.lag(state.lanes.serving, now) > 0
            if trained and now not in state.versions:
                await self.offer(step, "trained")
        await self._announce()

    def ahead(self, step: int) -> float:
        """Updates of the learner since the version that served at the last `tend`; 0 before there
        was one."""
        if self.lanes is None:
            return 0
        return self.lineage.lag(self.lanes.serving, self.run.policies.versions(step)[POLICY])

    def too_far_ahead(self, step: int) -> str:
        """Why the learner has to wait for a decision; empty if it may continue."""
        most = max_updates_ahead(self.run.config.algorithm.max_staleness)
        if self.lanes is None or self.ahead(step) < most:
            return ""
        candidate = self.lanes.candidate
        about = "the version that is offered" if candidate is None else f"candidate {candidate}"
        return (
            f"it is {most} updates ahead of version {self.lanes.serving}, which serves "
            f"(algorithm.max_staleness), and continues after a decision about {about}"
        )

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
            sum(file.stat().st_size for file in path.iterdir()) for path in self._folders().values()
        ]
        return max(sizes, default=0)

    def _folders(self) -> dict[int, Path]:
        """The existing folders of versions, by version."""
        paths = Path(self.run.config.output, FOLDER).glob(f"{POLICY}-*")
        return {
            int(path.name.rpartition("-")[2]): path for path in paths if PARTIAL not in path.name
        }

    async def _add(
        self, version: int, path: Path, kind: VersionKind, step: int, copied_from: str = ""
    ) -> None:
        await self._freeze(version, path)
        lanes = (await self.documents.state()).lanes
        row = Version(
            version=version, step=step, path=str(path.relative_to(self.run.config.output)),
            offered=time.time(), source=lanes.serving if lanes else None, kind=kind,
            given=copied_from,
        )  # fmt: skip
        await self._announce()
        await put_version(self.run.store, self.run.config.name, row)
        log_phase(log, f"version {version} is offered")

    async def _freeze(self, version: int, path: Path) -> None:
        async with self.run.serving.updating():
            await self.run.serving.freeze(policy_of(version), path, version)
        self.served.add(version)

    async def _serve(self, state: LiveState) -> None:
        """Serve exactly the versions of the lanes, and the offered one."""
        wanted = wanted_of(state)
        for version in sorted(wanted - self.served):
            self.unwanted.pop(version, None)
            await self._load(state, version)
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
        self._delete_old(state, wanted)

    async def _load(self, state: LiveState, version: int) -> None:
        """Serve a version again. One that cannot be loaded leaves its lane, unless it serves."""
        path = self._path(state.versions[version])
        try:
            if not path.is_dir():
                raise PolicyError(f"there is no folder {path}")
            await self._freeze(version, path)
        except UNUSABLE as error:
            if state.lanes is None or version == state.lanes.serving:
                raise PolicyError(
                    f"version {version} serves, and cannot be loaded: {error}"
                ) from error
            await self._drop(state, version, f"its weights cannot be loaded: {error}")

    async def _drop(self, state: LiveState, version: int, why: str) -> None:
        """Remove a version that is not the serving one from the lanes."""
        assert state.lanes is not None
        log.warning("version %d: dropped: %s", version, why)
        lanes = state.lanes.without(version)
        event = Event(time=time.time(), kind="dropped", version=version, lanes=lanes, why=why)
        with suppress(Conflict):  # `tend` will read the other decision and try again
            await records.decide(self.run.store, self.run.config.name, state, event)

    def _delete_old(self, state: LiveState, wanted: set[int]) -> None:
        """Delete the folders of versions that can no longer be served or offered again."""
        served = [event.version for event in state.events if event.kind in ("first", "promoted")]
        needed = (
            wanted | self.served | set(served[-KEPT_VERSIONS:]) | {min(state.versions, default=0)}
        )
        for version, folder in self._folders().items():
            if version not in needed:
                delete_directory(folder)

    def _path(self, version: Version) -> Path:
        return Path(self.run.config.output, version.path)

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

    async def _follow_serving(self, state: LiveState, now: int) -> None:
        """Continue learning from the serving version, if there is a reason to; a failed load is
        retried at the next call."""
        assert state.lanes is not None
        new, serving = state.events[self.lineage.decided :], state.lanes.serving
        if why := self._why_from_serving(state, now, new):
            try:
                await asyncio.to_thread(self.run.policies.load, self._path(state.versions[serving]))
            except UNUSABLE as error:
                self._stop_learning(f"{why}, but version {serving} cannot be loaded: {error}")
                return
            self.lineage.resets.append(Reset(now, serving))
            log_phase(log, f"the learner continues from version {serving}: {why}")
        self.lineage.decided, self.blocked = len(state.events), ""

    def _stop_learning(self, why: str) -> None:
        if why != self.blocked:
            log.warning("learning is paused, serving continues: %s", why)
        self.blocked = why

    def _why_from_serving(self, state: LiveState, now: int, new: Sequence[Event]) -> str:
        """Why the learner has to continue from the serving version, not from its own weights; empty
        if it need not. new: the decisions since the last call."""
        assert state.lanes is not None
        serving = state.lanes.serving
        lag = self.lineage.lag(serving, now)
        bad = [event.version for event in new if records.resets(event)]
        derived = [version for version in bad if self.lineage.lag(version, now) < inf]
        if derived and serving not in derived and lag:
            return f"version {derived[-1]}, from which the learner comes, was rejected"
        if lag == inf:
            return "the learner does not descend from the serving version"
        undecided = state.lanes.candidate is not None or pending(state) or now not in state.versions
        if not undecided and lag >= max_updates_ahead(self.run.config.algorithm.max_staleness):
            return f"there was no decision after {lag:.0f} updates"
        return ""

    async def _serve_offered(self, state: LiveState, step: int) -> None:
        """Serve the first of the checkpoints that users offer."""
        wishes = records.unmet(state)
        if not wishes or state.lanes is None or pending(state):
            return
        version, wish = wishes[0]
        try:
            await asyncio.to_thread(self._copy, Path(wish.path), self.folder(version))
            await self._add(version, self.folder(version), "offered by hand", step, wish.path)
        except UNUSABLE as error:
            if version in self.served:  # the store failed, so the version is announced later
                raise
            await self._drop(state, version, f"{wish.path} cannot be offered: {error}")

    def _copy(self, source: Path, target: Path) -> None:
        """Copy the files of a checkpoint. Those of this run never change: links are enough."""
        if target.is_dir():
            return
        in_run = source.is_relative_to(Path(self.run.config.output).resolve())
        with atomic_directory(target) as partial:
            for file in source.iterdir():
                if file.is_file():
                    _link_or_copy(file, partial / file.name) if in_run else shutil.copy(
                        file, partial
                    )


def _link_or_copy(file: Path, target: Path) -> None:
    try:
        os.link(file, target)
    except OSError:  # another file system, or one without links
        shutil.copy(file, target)


def pending(state: LiveState) -> set[int]:
    """The version that is offered next, if it is undecided."""
    following = records.next_offer(state)
    return set() if following is None else {following.version}


def wanted_of(state: LiveState) -> set[int]:
    """The versions to serve: of the lanes, and the one that is offered."""
    if state.lanes is None:
        return set(state.versions)
    wanted = records.served(state.lanes) | pending(state)
    return {version for version in wanted if version in state.versions}


def max_updates_ahead(staleness: float) -> int:
    """Updates of the learner since the serving version, after which it waits for a decision."""
    return max(1, ceil(staleness))
