"""Snapshots of a policy on disk and in service: what the opponents of its pool play with.

Owns the directories `<output>/pool/NAME@STEPS`: an ordinary Hugging Face directory or an adapter,
without what only training needs. Always true: a directory is whole when it is there, and is there
before the commit that remembers its snapshot; it goes after the commit that has forgotten it.
"""

from __future__ import annotations

import shutil
from dataclasses import dataclass, field
from pathlib import Path

from agentrl.algorithms.learners.base import Learner
from agentrl.algorithms.sampling.selfplay import OpponentPool, Snapshot
from agentrl.algorithms.train.checkpoint import save_policy
from agentrl.algorithms.train.serving import PolicyServers
from agentrl.errors import PolicyError
from agentrl.files import PARTIAL
from agentrl.store.base import Store
from agentrl.types import RolloutState


@dataclass(frozen=True, slots=True)
class SnapshotStore:
    """What a pool's snapshots are made of, and where they are served. learner: of the policy; run:
    whose rollouts in the store name them."""

    pool: OpponentPool
    learner: Learner
    serving: PolicyServers
    store: Store
    run: str
    folder: Path
    served: set[str] = field(default_factory=set)

    async def start(self, steps: int) -> None:
        """A run that has come to so many steps begins, with a first opponent if it has none.

        Raises PolicyError for a snapshot that is not on disk any more."""
        if not self.pool.now.snapshots:
            await self.save_due(steps)
        async with self.serving.updating():
            await self._serve()

    async def save_due(self, steps: int) -> None:
        """So many steps are trained, and the commit that says so is next."""
        taken = self.pool.finish(steps, await self._playing() if self.pool.ahead else ())
        if taken is not None:
            save_policy(self.folder / taken.name, self.learner)

    async def serve_pool(self) -> None:
        """Serve what the pool holds, and nothing else; inside `updating`, after the commit, which
        only the owner of the run can make: what others may need is deleted by nobody else."""
        await self._serve()
        for path in self.folder.iterdir():
            if path.name not in self.served and (PARTIAL in path.name or "@" in path.name):
                shutil.rmtree(path)

    async def _serve(self) -> None:
        held = {snapshot.name: snapshot for snapshot in self.pool.now.snapshots}
        for name in sorted(self.served - held.keys()):
            await self.serving.drop(name)
            self.served.remove(name)
        for name in sorted(held.keys() - self.served):
            await self.serving.freeze(name, self._directory(held[name]), held[name].step)
            self.served.add(name)

    async def _playing(self) -> set[str]:
        """Who has a seat in a rollout that has not ended."""
        unended = [state for state in RolloutState if not state.terminal]
        found = [await self.store.rollouts(self.run, state=state) for state in unended]
        return {name for rows in found for row in rows for name in row.seats.values()}

    def _directory(self, snapshot: Snapshot) -> Path:
        directory = self.folder / snapshot.name
        if not directory.is_dir():
            raise PolicyError(
                f"{directory}: the checkpoint remembers this opponent, and its folder is gone; put "
                "it back, or start a new run"
            )
        return directory
