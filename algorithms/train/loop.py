"""The training loop: ask, claim groups, update, commit, publish, evaluate.

It owns nothing that the store or the last checkpoint does not hold, so it may be killed anywhere:
the next start continues after the last committed step. It never knows which algorithm it runs.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path

from agentrl.algorithms.diagnostics.metrics import group_metrics, throughput
from agentrl.algorithms.sampling.collect import Collected, Collector
from agentrl.algorithms.sampling.evaluate import evaluate_heldout
from agentrl.algorithms.train import empty_steps
from agentrl.algorithms.train.checkpoint import checkpoint_name, prune, save_checkpoint
from agentrl.algorithms.train.policy_set import PolicySet
from agentrl.algorithms.train.serving import PolicyServers
from agentrl.algorithms.train.snapshots import SnapshotStore
from agentrl.config import RunConfig
from agentrl.folder_lock import FolderLock
from agentrl.store.base import Store
from agentrl.types import Json, RunState, StepCommit


@dataclass(frozen=True, slots=True)
class TrainingLoop:
    """Everything one run trains with. `state` is what `open_run` returned."""

    config: RunConfig
    store: Store
    state: RunState
    policies: PolicySet
    serving: PolicyServers
    collector: Collector
    heldout: list[dict[str, Json]]
    lock: FolderLock
    snapshots: SnapshotStore | None = None  # none: nobody plays against snapshots

    async def run(self) -> None:
        """Train from the last committed step to the last one of the run file."""
        await self.publish()
        await self.evaluate(self.state.step)
        for step in range(self.state.step, self.config.steps):
            started = time.monotonic()
            collected = await self.collector.collect(step)
            sampled = time.monotonic()
            async with self.serving.updating():
                metrics = self.policies.update(step, collected.groups) | collected.metrics
                metrics["time/rollouts"] = sampled - started
                metrics["time/update"] = time.monotonic() - sampled
                metrics |= throughput(metrics)
                if empty := self.is_empty(step, collected, metrics):
                    await self.commit_empty(step, collected, metrics)
                else:
                    await self.commit(step, collected, metrics)
                await self.serving.publish(self.policies.versions(step + 1))
                if self.snapshots is not None:
                    await self.snapshots.serve_pool()
            if empty:
                await empty_steps.check(self.store, self.config)
            await self.publish()
            await self.evaluate(step + 1)
        await empty_steps.check(self.store, self.config)  # again, by whom it is started again

    def is_empty(self, step: int, collected: Collected, metrics: dict[str, float]) -> bool:
        """Whether the step had nothing to learn from."""
        groups, discarded = collected.groups, collected.discarded
        return empty_steps.is_empty(self.policies, step, metrics, groups, discarded)

    async def commit_empty(
        self, step: int, collected: Collected, metrics: dict[str, float]
    ) -> None:
        """The step took place, and all that came of it are failures: the checkpoint before it
        stays the last."""
        groups = [*collected.groups, *collected.discarded]
        await self.store.commit_step(
            StepCommit(
                run=self.config.name,
                epoch=self.state.epoch,
                step=step,
                groups=[],
                discarded=[group.id for group in groups],
                versions=self.policies.versions(step + 1),
                checkpoint=None,
                metrics=empty_steps.failure_counts(metrics | group_metrics(groups)),
            )
        )

    async def commit(self, step: int, collected: Collected, metrics: dict[str, float]) -> None:
        """Write the checkpoint, then make the step true; earlier checkpoints go last."""
        self.lock.check()
        folder = Path(self.config.output, "checkpoints")
        path = folder / checkpoint_name(step + 1, self.state.epoch)
        if self.snapshots is not None:
            await self.snapshots.save_due(step + 1)
        save_checkpoint(path, self.policies, self.policies.dump(), self.state.identity)
        await self.store.commit_step(
            StepCommit(
                run=self.config.name,
                epoch=self.state.epoch,
                step=step,
                groups=[group.id for group in collected.groups],
                discarded=[group.id for group in collected.discarded],
                credits=self.policies.credits(step),
                judgements=self.policies.judgements(step),
                versions=self.policies.versions(step + 1),
                checkpoint=f"checkpoints/{path.name}",
                metrics=metrics,
            )
        )
        keep = self.config.keep_checkpoints
        prune(folder, keep=keep, last=path, run=self.state.identity)

    async def publish(self) -> None:
        """Tell the runners where each policy is served."""
        await self.serving.announce(self.store, self.config.name, self.state.epoch)

    async def evaluate(self, step: int) -> None:
        """Held-out scores after `step` steps, where the run file asks for them."""
        settings = self.config.eval
        outer = step in (0, self.config.steps)
        if not self.heldout or not (outer or (settings.every and step % settings.every == 0)):
            return
        limit = settings.tasks if outer else settings.curve_tasks
        tasks = self.heldout[: limit or None]
        temperatures = {"score": settings.temperature}
        if outer and settings.sampled:
            temperatures["sampled"] = 1.0
        epoch = self.state.epoch
        await evaluate_heldout(self.store, self.config, epoch, step, tasks, temperatures)
