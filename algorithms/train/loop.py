"""The training loop: claim groups, compute credit, update, commit, publish, evaluate.

All of its state is in the store or the last checkpoint, so it may be killed at any moment: the next
start continues after the last committed step. It does not know which algorithm it runs, nor which
parts the run has: they join by `hooks.py`.
"""

from __future__ import annotations

import asyncio
import json
import time
from dataclasses import dataclass, replace
from pathlib import Path

from agentrl.algorithms.diagnostics.metrics import Metrics, throughput
from agentrl.algorithms.sampling.collect import Collected, GroupSource
from agentrl.algorithms.sampling.evaluate import check_verifier
from agentrl.algorithms.sampling.stragglers import settle_groups_ahead
from agentrl.algorithms.train.checkpoint import (
    checkpoint_name,
    parse_name,
    prune,
    save_checkpoint,
)
from agentrl.algorithms.train.empty_steps import check_empty_steps, empty_commit, is_empty
from agentrl.algorithms.train.heldout import HeldoutEvaluator
from agentrl.algorithms.train.hooks import Hooks, ServedRun
from agentrl.types import StepCommit


@dataclass(frozen=True, slots=True)
class TrainingLoop:
    """Trains a run whose servers run."""

    live: ServedRun
    source: GroupSource
    heldout: HeldoutEvaluator
    hooks: Hooks

    async def run(self) -> None:
        """Train from the last committed step to the last one of the run file."""
        live, first = self.live, self.live.state.step
        await live.serving.announce(live.store, live.config.name, live.state.epoch)
        stalled = await self.evaluate(first)
        saved = self.saved_steps()
        updated = time.monotonic()
        for step in range(first, live.config.steps):
            if stalled:
                break
            await self.hooks.before_step(step)
            before = json.dumps(live.policies.dump())
            started = time.monotonic()
            collected = await self.source.collect(step)  # claims the groups of the step
            groups, added = await self.hooks.complete(collected.groups)
            collected = replace(collected, groups=groups)
            claimed = time.monotonic()
            async with live.serving.updating():
                # Credit, packing, gradients. In a thread, because servers run on this loop.
                metrics = await asyncio.to_thread(live.policies.update, step, collected.groups)
                metrics |= collected.metrics | added | {"time/learner_idle": claimed - updated}
                metrics["time/sampler_idle"] = live.serving.idle_seconds()
                updated = time.monotonic()
                metrics |= {"time/rollouts": claimed - started, "time/update": updated - claimed}
                metrics |= throughput(metrics)
                if empty := is_empty(live.policies, step, metrics, collected):
                    # What no checkpoint has, a restarted process would not know.
                    live.policies.restore(json.loads(before))
                    commit = empty_commit(live.state, live.policies, step, collected, metrics)
                    await live.store.commit_step(commit)
                else:
                    await asyncio.to_thread(live.policies.update_references, saved, step + 1)
                    saved = step + 1
                    await self.commit(step, collected, metrics)
                await live.serving.publish(live.policies.versions(step + 1))
                await self.hooks.published()
            if empty:
                if step == 0:
                    found = [*collected.groups, *collected.discarded]
                    check_verifier(
                        live.config, [rollout for group in found for rollout in group.rollouts]
                    )
                await check_empty_steps(live.store, live.config)
            await live.serving.announce(live.store, live.config.name, live.state.epoch)
            stalled = await self.evaluate(step + 1)
        await self.heldout.finish()
        await check_empty_steps(live.store, live.config)  # also if no step was left to train

    def saved_steps(self) -> int:
        """The number of steps of the last checkpoint; later ones were empty."""
        named = self.live.state.checkpoint and parse_name(Path(self.live.state.checkpoint))
        return named[0] if named else 0

    async def commit(self, step: int, collected: Collected, metrics: Metrics) -> None:
        """Write the checkpoint, commit the step that names it, and delete old checkpoints."""
        live, policies = self.live, self.live.policies
        await settle_groups_ahead(live.store, live.config)
        live.lock.check()
        path = Path(live.config.output, "checkpoints", checkpoint_name(step + 1, live.state.epoch))
        rewards = await self.hooks.before_commit(step + 1)  # may change the state
        save_checkpoint(path, policies, policies.dump(), live.state.identity)
        await live.store.commit_step(
            StepCommit(
                run=live.config.name,
                epoch=live.state.epoch,
                step=step,
                groups=[group.id for group in collected.groups if collected.stored],
                discarded=[group.id for group in collected.discarded],
                credits=policies.credits(step),
                rewards=[*rewards, *policies.step_rewards(step)],
                versions=policies.versions(step + 1),
                checkpoint=f"checkpoints/{path.name}",
                metrics=metrics,
            )
        )
        prune(path.parent, keep=live.config.keep_checkpoints, last=path, run=live.state.identity)

    async def evaluate(self, step: int) -> bool:
        """Evaluate after `step` steps, if due; returns whether held-out scores have stalled."""
        live, settings = self.live, self.live.config.eval
        outer = step in (0, live.config.steps)
        if not (outer or (settings.every and step % settings.every == 0)):
            return False
        await self.hooks.evaluate(step, settings.tasks if outer else settings.curve_tasks)
        return await self.heldout.score(step)
