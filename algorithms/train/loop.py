"""The training loop: claim groups, compute credit, update, commit, publish, evaluate.

All of its state is in the store or the last checkpoint, so it may be killed at any moment: the next
start continues after that checkpoint (`saving.py`). It does not know which algorithm it runs, nor
which features the run has: it calls each of them by the methods of `features.py`.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace

from msgspec import structs

from agentrl.algorithms.diagnostics.metrics import Metrics, throughput
from agentrl.algorithms.sampling.collect import Collected, GroupSource
from agentrl.algorithms.sampling.evaluate import check_first
from agentrl.algorithms.sampling.stragglers import settle_groups_ahead
from agentrl.algorithms.train.empty_steps import (
    check_empty_steps,
    check_failed,
    empty_commit,
    is_empty,
)
from agentrl.algorithms.train.features import Feature, ServedRun
from agentrl.algorithms.train.heldout import HeldoutEvaluator
from agentrl.algorithms.train.saving import Checkpoints
from agentrl.types import StepCommit, StepReward


@dataclass(frozen=True, slots=True)
class TrainingLoop:
    """Trains a run whose servers run."""

    live: ServedRun
    source: GroupSource
    heldout: HeldoutEvaluator
    features: Sequence[Feature]

    async def run(self) -> None:
        """Train from the last checkpoint to the last one of the run file."""
        live, first = self.live, self.live.state.step
        await live.serving.announce(live.store, live.config.name, live.state.epoch)
        stalled = await self.evaluate(first)
        checkpoints = Checkpoints(live)
        updated = time.monotonic()
        for step in range(first, live.config.steps):
            if stalled:
                break
            for feature in self.features:
                await feature.before_step(step)
            before = json.dumps(live.policies.dump())
            started = time.monotonic()
            collected = await self.source.collect(step)  # claims the groups of the step
            groups, added = collected.groups, Metrics()
            for feature in self.features:
                groups, more = await feature.complete(groups)
                added |= more
            collected = replace(collected, groups=groups)
            claimed = time.monotonic()
            async with live.serving.updating():
                # Credit, packing, gradients. In a thread, because servers run on this loop.
                metrics = await asyncio.to_thread(live.policies.update, step, collected.groups)
                metrics |= collected.metrics | added | {"time/learner_idle": claimed - updated}
                metrics["time/sampler_idle"] = live.serving.idle_seconds()
                updated = time.monotonic()
                metrics |= {"time/rollouts": claimed - started, "time/update": updated - claimed}
                metrics |= throughput(metrics) | {"groups/ready": float(collected.ready)}
                if empty := is_empty(live.policies, step, metrics, collected):
                    # What no checkpoint has, a restarted process would not know.
                    live.policies.restore(json.loads(before))
                    commit = empty_commit(live.state, live.policies, step, collected, metrics)
                    saved, _ = await checkpoints.before_commit(step + 1, trained=False)
                    await live.store.commit_step(structs.replace(commit, checkpoint=saved))
                else:
                    since = checkpoints.trained
                    await asyncio.to_thread(live.policies.update_references, since, step + 1)
                    await self.commit(step, collected, metrics, checkpoints)
                await checkpoints.after_commit(step + 1)
                await live.serving.publish(live.policies.versions(step + 1))
                for feature in self.features:
                    await feature.published()
            if empty:
                if step == 0:
                    found = [*collected.groups, *collected.discarded]
                    rollouts = [rollout for group in found for rollout in group.rollouts]
                    check_first(live.config, rollouts, unchanged_only=True)
                await check_empty_steps(live.store, live.config)
            check_failed(live.config, collected)
            await live.serving.announce(live.store, live.config.name, live.state.epoch)
            stalled = await self.evaluate(step + 1)
        await self.heldout.finish()
        await check_empty_steps(live.store, live.config)  # also if no step was left to train

    async def commit(
        self, step: int, collected: Collected, metrics: Metrics, checkpoints: Checkpoints
    ) -> None:
        """Commit the step, with the name of a checkpoint that is new."""
        live, policies = self.live, self.live.policies
        await settle_groups_ahead(live.store, live.config)
        live.lock.check()
        rewards = list[StepReward]()
        for feature in self.features:
            rewards += await feature.before_commit(step + 1)  # may change the state
        checkpoint, waited = await checkpoints.before_commit(step + 1)
        await live.store.commit_step(
            StepCommit(
                run=live.config.name,
                epoch=live.state.epoch,
                step=step,
                groups=[group.id for group in collected.groups if collected.stored],
                discarded=[group.id for group in collected.discarded],
                credits=policies.credits(step, collected.groups),
                rewards=[*rewards, *policies.step_rewards(step)],
                versions=policies.versions(step + 1),
                checkpoint=checkpoint,
                metrics=metrics | {"time/checkpoint": waited},
            )
        )

    async def evaluate(self, step: int) -> bool:
        """Evaluate after `step` steps, if due; returns whether held-out scores have stalled."""
        live, settings = self.live, self.live.config.eval
        outer = step in (0, live.config.steps)
        if not (outer or (settings.every and step % settings.every == 0)):
            return False
        for feature in self.features:
            await feature.evaluate(step, settings.tasks if outer else settings.curve_tasks)
        return await self.heldout.score(step)
