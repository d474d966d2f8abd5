"""Held-out evaluation during a run. The loop waits for it or, with `eval.concurrent`, continues.

Owns `<output>/evaluation/<steps>`, the policies that are scored while training continues. Always
true: such a folder is complete, and exists until its score is in the store, so a restarted process
finishes the evaluations of a killed one.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from agentrl.algorithms.sampling.evaluate import evaluate_heldout
from agentrl.algorithms.sampling.rollouts import CandidateInUse
from agentrl.algorithms.sampling.scores import has_stalled
from agentrl.algorithms.train.checkpoint import export_checkpoint, mark_best
from agentrl.algorithms.train.policy_set import PolicySet
from agentrl.algorithms.train.serving import PolicyServers
from agentrl.base.files import PARTIAL, atomic_directory, delete_directory
from agentrl.config import RunConfig
from agentrl.store.base import Store
from agentrl.types import Json


@dataclass(slots=True)
class HeldoutEvaluator:
    """Scores the policies of a run on its held-out tasks, one evaluation at a time."""

    config: RunConfig
    store: Store
    epoch: int
    identity: str
    policies: PolicySet
    serving: PolicyServers
    tasks: list[dict[str, Json]]
    candidate: CandidateInUse  # whose prompts the agent uses
    running: tuple[asyncio.Task[None], Path, Mapping[str, str]] | None = None  # see `_begin`

    @property
    def folder(self) -> Path:
        return Path(self.config.output, "evaluation")

    async def start(self, steps: int) -> None:
        """Resume the evaluations of a killed process, for policies of at most `steps` steps."""
        for path in sorted(self.folder.glob("[0-9]*")):
            if PARTIAL not in path.name and int(path.name) <= steps:
                await self._begin(path)
            else:  # an incomplete copy, or of a rewound step
                delete_directory(path)

    async def score(self, step: int) -> bool:
        """Score the policies after `step` steps; with `eval.concurrent`, and between the first and
        the last step, in the background. Returns whether scores have stalled."""
        settings, path = self.config.eval, self.folder / f"{step:06d}"
        if not self.tasks:
            return False
        if not path.is_dir():  # a restarted process scores it already
            await self.finish()
            if step in (0, self.config.steps) or not settings.concurrent:
                await self._score(step)
            elif await self._save(path):
                await self._begin(path)
        scores = await mark_best(self.store, self.config, self.identity)
        return has_stalled(scores, settings.patience)

    async def finish(self) -> None:
        """Wait for the running evaluation, if there is one, and drop its policies."""
        if self.running is not None:
            scoring, path, served = self.running
            await scoring
            self.running = None
            async with self.serving.updating():
                for name in served.values():
                    await self.serving.drop(name)
            await mark_best(self.store, self.config, self.identity)
            delete_directory(path)

    async def _begin(self, path: Path) -> None:
        await self.finish()
        step, served = int(path.name), {}
        async with self.serving.updating():
            for name, version in self.policies.versions(step).items():
                served[name] = f"{name}@heldout{step}"
                await self.serving.freeze(served[name], path / name, version)
        await self.serving.announce(self.store, self.config.name, self.epoch)
        self.running = asyncio.create_task(self._score(step, served)), path, served

    async def _score(self, step: int, served: Mapping[str, str] = {}) -> None:
        """served: policy -> the name under which the version to score is served."""
        settings, outer = self.config.eval, step in (0, self.config.steps)
        limit = settings.tasks if outer else settings.curve_tasks
        tasks, candidate = self.tasks[: limit or None], self.candidate.id
        await evaluate_heldout(self.store, self.config, self.epoch, step, tasks, candidate, served)

    async def _save(self, path: Path) -> bool:
        """Copy the policies of the last checkpoint, which may be deleted before they are scored.
        False: there is no checkpoint, because no step has changed a weight."""
        state = await self.store.run(self.config.name)
        if state is None or state.checkpoint is None:
            return False
        source = self.config.checkpoint_path(state.checkpoint)
        path.parent.mkdir(parents=True, exist_ok=True)
        with atomic_directory(path) as partial:
            for name in self.policies.updaters:
                export_checkpoint(self.policies.folder(source, name), partial / name)
        return True
