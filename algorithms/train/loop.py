"""The training loop: claim groups, compute credit, update, commit, publish, evaluate.

All of its state is in the store or the last checkpoint, so it may be killed at any moment: the next
start continues after the last committed step. It does not know which algorithm it runs.
"""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass, field, replace
from pathlib import Path

from agentrl.algorithms.diagnostics.metrics import Metrics, throughput
from agentrl.algorithms.judges.judge import Judges
from agentrl.algorithms.prompts.schedule import PromptSchedule
from agentrl.algorithms.sampling.collect import Collected, Collector
from agentrl.algorithms.sampling.evaluate import check_verifier, evaluate_functions
from agentrl.algorithms.sampling.stragglers import settle_groups_ahead
from agentrl.algorithms.train.checkpoint import checkpoint_name, prune, save_checkpoint
from agentrl.algorithms.train.empty_steps import check_empty_steps, empty_commit, is_empty
from agentrl.algorithms.train.heldout import HeldoutEvaluator
from agentrl.algorithms.train.offline import DatasetCollector
from agentrl.algorithms.train.policy_set import PolicySet
from agentrl.algorithms.train.serving import PolicyServers
from agentrl.algorithms.train.snapshots import SnapshotStore
from agentrl.base.folder_lock import FolderLock
from agentrl.config import RunConfig
from agentrl.store.base import Store
from agentrl.types import RunState, StepCommit


@dataclass(frozen=True, slots=True)
class TrainingLoop:
    """The parts of a training run. state: the result of `open_run`."""

    config: RunConfig
    store: Store
    state: RunState
    policies: PolicySet
    serving: PolicyServers
    collector: Collector | DatasetCollector
    heldout: HeldoutEvaluator
    lock: FolderLock
    prompts: PromptSchedule
    snapshots: SnapshotStore | None = None  # None: no pool of opponents
    judges: Judges = field(default_factory=lambda: Judges([]))

    async def run(self) -> None:
        """Train from the last committed step to the last one of the run file."""
        await self.serving.announce(self.store, self.config.name, self.state.epoch)
        stalled = await self.evaluate(self.state.step)
        updated = time.monotonic()
        for step in range(self.state.step, self.config.steps):
            if stalled:
                break
            await self.prompts.before_step(step)
            started = time.monotonic()
            collected = await self.collector.collect(step)  # claims the groups of the step
            groups, judged = await self.judges.complete(collected.groups)
            collected = replace(collected, groups=groups)
            claimed = time.monotonic()
            async with self.serving.updating():
                # Credit, packing, gradients. In a thread, because servers run on this loop.
                metrics = await asyncio.to_thread(self.policies.update, step, collected.groups)
                metrics |= collected.metrics | judged | {"time/learner_idle": claimed - updated}
                metrics["time/sampler_idle"] = self.serving.idle_seconds()
                updated = time.monotonic()
                metrics |= {"time/rollouts": claimed - started, "time/update": updated - claimed}
                metrics |= throughput(metrics)
                if empty := is_empty(self.policies, step, metrics, collected):
                    commit = empty_commit(self.state, self.policies, step, collected, metrics)
                    await self.store.commit_step(commit)
                else:
                    await self.commit(step, collected, metrics)
                await self.serving.publish(self.policies.versions(step + 1))
                if self.snapshots is not None:
                    await self.snapshots.serve_pool()
            if empty:
                if step == 0:
                    found = [*collected.groups, *collected.discarded]
                    check_verifier(self.config, [row for group in found for row in group.rollouts])
                await check_empty_steps(self.store, self.config)
            await self.serving.announce(self.store, self.config.name, self.state.epoch)
            stalled = await self.evaluate(step + 1)
        await self.heldout.finish()
        await check_empty_steps(self.store, self.config)  # also if no step was left to train

    async def commit(self, step: int, collected: Collected, metrics: Metrics) -> None:
        """Write the checkpoint, commit the step that names it, and delete old checkpoints."""
        await settle_groups_ahead(self.store, self.config)
        self.lock.check()
        path = Path(self.config.output, "checkpoints", checkpoint_name(step + 1, self.state.epoch))
        if self.snapshots is not None:
            await self.snapshots.save_due(step + 1)
        save_checkpoint(path, self.policies, self.policies.dump(), self.state.identity)
        await self.store.commit_step(
            StepCommit(
                run=self.config.name,
                epoch=self.state.epoch,
                step=step,
                groups=[group.id for group in collected.groups if collected.stored],
                discarded=[group.id for group in collected.discarded],
                credits=self.policies.credits(step),
                rewards=[*self.judges.rewards, *self.policies.step_rewards(step)],
                versions=self.policies.versions(step + 1),
                checkpoint=f"checkpoints/{path.name}",
                metrics=metrics,
            )
        )
        prune(path.parent, keep=self.config.keep_checkpoints, last=path, run=self.state.identity)

    async def evaluate(self, step: int) -> bool:
        """Evaluate after `step` steps, if due; returns whether held-out scores have stalled."""
        settings, outer = self.config.eval, step in (0, self.config.steps)
        if not (outer or (settings.every and step % settings.every == 0)):
            return False
        if isinstance(self.collector, DatasetCollector):
            await self.collector.evaluate(step, settings.tasks if outer else settings.curve_tasks)
        await evaluate_functions(self.store, self.config, self.state.epoch, step)
        return await self.heldout.score(step)
