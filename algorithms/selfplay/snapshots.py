"""Snapshots of a policy, saved to disk and served as opponents for self-play.

Owns the directories `<output>/pool/NAME@STEPS`: a Hugging Face model or an adapter, without
optimizer state. Always true: a directory is complete once it exists; it is written before the
commit that adds its snapshot to the pool, and deleted once the run's checkpoint, from which a
killed one continues, is without it."""

from __future__ import annotations

import logging
from dataclasses import dataclass, field
from pathlib import Path

from agentrl.algorithms.learners.base import Learner
from agentrl.algorithms.selfplay.pool import OpponentPool
from agentrl.algorithms.train.checkpoint import parse_name, save_policy
from agentrl.algorithms.train.serving import PolicyServers
from agentrl.base.files import PARTIAL, delete_directory
from agentrl.errors import PolicyError
from agentrl.store.base import Store
from agentrl.types import Rollout, RolloutState

log = logging.getLogger("agentrl.algorithm")


@dataclass(frozen=True, slots=True)
class SnapshotStore:
    """Saves and serves the snapshots of a pool. learner: of the pool's policy; run: the name of the
    run."""

    pool: OpponentPool
    learner: Learner
    serving: PolicyServers
    store: Store
    run: str
    folder: Path
    served: set[str] = field(default_factory=set)
    dropped: dict[str, int] = field(default_factory=dict)  # steps at which, by name, until deleted

    async def start(self, steps: int) -> None:
        """Serve the pool at the start of the process, after `steps` steps; adds a first snapshot to
        an empty pool, and cancels games against snapshots of steps that were rolled back. Raises
        PolicyError for a snapshot that is missing on disk."""
        if not self.pool.now.snapshots:
            await self.save_due(steps)
        known = {snapshot.name for snapshot in self.pool.now.snapshots}
        lost = [
            row.id
            for row in await self._running()
            if any(
                name not in known and name.startswith(f"{self.pool.policy}@")
                for name in row.seats.values()
            )
        ]
        if lost:
            log.warning("%d games against opponents that are no longer there: cancelled", len(lost))
            await self.store.cancel(lost)
        async with self.serving.updating():
            await self._serve()

    async def save_due(self, steps: int) -> None:
        """Save the snapshot that is due after `steps` steps, before the commit of the last step."""
        rows = await self._running() if self.pool.ahead else ()
        playing = {name for row in rows for name in row.seats.values()}
        snapshot = self.pool.finish(steps, playing)
        if snapshot is not None:
            save_policy(self.folder / snapshot.name, self.learner)

    async def serve_pool(self) -> None:
        """Serve exactly the snapshots of the pool and delete all others that no checkpoint needs.
        Call inside `updating` after a commit: only the run's owner can commit, so no other process
        deletes files."""
        before, run = {*self.served}, await self.store.run(self.run)
        assert run is not None
        await self._serve()
        self.dropped.update(dict.fromkeys(before - self.served, run.step))
        saved, _ = (run.checkpoint and parse_name(Path(run.checkpoint))) or (0, 0)
        needed = {name for name, steps in self.dropped.items() if steps > saved}
        for path in self.folder.iterdir():
            if path.name not in self.served | needed and (PARTIAL in path.name or "@" in path.name):
                self.dropped.pop(path.name, None)
                delete_directory(path)

    async def _running(self) -> list[Rollout]:
        """The rollouts that have not ended."""
        states = [state for state in RolloutState if not state.terminal]
        found = [await self.store.rollouts(self.run, state=state) for state in states]
        return [row for rows in found for row in rows]

    async def _serve(self) -> None:
        wanted = {snapshot.name: snapshot for snapshot in self.pool.now.snapshots}
        for name in sorted(self.served - wanted.keys()):
            await self.serving.drop(name)
            self.served.remove(name)
        for name in sorted(wanted.keys() - self.served):
            if not (self.folder / name).is_dir():
                raise PolicyError(
                    f"{self.folder / name}: the checkpoint has this opponent in its pool, and the "
                    "folder is missing; restore it, or start a new run"
                )
            await self.serving.freeze(name, self.folder / name, wanted[name].step)
            self.served.add(name)
