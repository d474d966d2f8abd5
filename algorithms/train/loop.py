"""The training loop: claim groups, compute credit, update, commit, publish, evaluate.

Everything it knows is in the store or the last checkpoint, so it may be killed at any moment: the
next start continues after the last committed step. It does not know which algorithm it runs.

A step is empty if all its rollouts failed, or none has a call that can be trained. It commits its
failure counts and nothing else. How many came in a row is read from the store, so it is right after
a restart too.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import takewhile
from pathlib import Path

from agentrl.algorithms.data.merge import valid
from agentrl.algorithms.diagnostics.metrics import Metrics, group_metrics, throughput
from agentrl.algorithms.judges.judge import Judges
from agentrl.algorithms.sampling.collect import Collected, Collector
from agentrl.algorithms.sampling.evaluate import evaluate_heldout
from agentrl.algorithms.train.checkpoint import checkpoint_name, prune, save_checkpoint
from agentrl.algorithms.train.offline import DatasetCollector
from agentrl.algorithms.train.policy_set import PolicySet
from agentrl.algorithms.train.serving import PolicyServers
from agentrl.algorithms.train.snapshots import SnapshotStore
from agentrl.config import RunConfig
from agentrl.errors import TrainingError
from agentrl.failures import commonest_failure
from agentrl.folder_lock import FolderLock
from agentrl.store.base import Store
from agentrl.types import EMPTY, Group, Json, Purpose, RolloutState, RunState, StepCommit, StepRow

# Metrics that an empty step commits, besides rollouts/failed/*.
FAILURES = ("rollouts", "rollouts/failed", "calls/refused", "calls/inexact", "calls/too_long")


@dataclass(frozen=True, slots=True)
class TrainingLoop:
    """Everything one run trains with. `state` is what `open_run` returned."""

    config: RunConfig
    store: Store
    state: RunState
    policies: PolicySet
    serving: PolicyServers
    collector: Collector | DatasetCollector
    heldout: list[dict[str, Json]]
    lock: FolderLock
    snapshots: SnapshotStore | None = None  # None: without a pool of opponents
    judges: Judges = field(default_factory=lambda: Judges([]))

    async def run(self) -> None:
        """Train from the last committed step to the last one of the run file."""
        await self.announce()
        await self.evaluate(self.state.step)
        for step in range(self.state.step, self.config.steps):
            started = time.monotonic()
            collected = await self.collector.collect(step)  # claims the groups of the step
            groups, judged = await self.judges.complete(collected.groups)
            collected = replace(collected, groups=groups)
            claimed = time.monotonic()
            async with self.serving.updating():
                # Credit, packing, gradients. In a thread: this loop has servers to attend to.
                metrics = await asyncio.to_thread(self.policies.update, step, collected.groups)
                metrics |= collected.metrics | judged
                metrics["time/rollouts"] = claimed - started
                metrics["time/update"] = time.monotonic() - claimed
                metrics |= throughput(metrics)
                empty = is_empty(
                    self.policies, step, metrics, collected.groups, collected.discarded
                )
                commit = self.commit_empty if empty else self.commit
                await commit(step, collected, metrics)
                await self.serving.publish(self.policies.versions(step + 1))
                if self.snapshots is not None:
                    await self.snapshots.serve_pool()
            if empty:
                await check_empty_steps(self.store, self.config)
            await self.announce()
            await self.evaluate(step + 1)
        await check_empty_steps(self.store, self.config)  # also where no step was left to train

    async def commit_empty(self, step: int, collected: Collected, metrics: Metrics) -> None:
        """Commit the failure counts of a step without one usable rollout. It trains no group and
        writes no checkpoint, so the one before it stays the last."""
        stored = collected.groups if collected.stored else []
        groups = [*stored, *collected.discarded]
        await self.store.commit_step(
            StepCommit(
                run=self.config.name,
                epoch=self.state.epoch,
                step=step,
                groups=[],
                discarded=[group.id for group in groups],
                versions=self.policies.versions(step + 1),
                checkpoint=None,
                metrics=failure_counts(metrics | group_metrics(groups)),
            )
        )

    async def commit(self, step: int, collected: Collected, metrics: Metrics) -> None:
        """Write the checkpoint, then commit the step that names it, then delete old checkpoints."""
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
                groups=[group.id for group in collected.groups if collected.stored],
                discarded=[group.id for group in collected.discarded],
                credits=self.policies.credits(step),
                rewards=[*self.judges.rewards, *self.policies.step_rewards(step)],
                versions=self.policies.versions(step + 1),
                checkpoint=f"checkpoints/{path.name}",
                metrics=metrics,
            )
        )
        keep = self.config.keep_checkpoints
        prune(folder, keep=keep, last=path, run=self.state.identity)

    async def announce(self) -> None:
        """Tell the runners where each policy is served."""
        await self.serving.announce(self.store, self.config.name, self.state.epoch)

    async def evaluate(self, step: int) -> None:
        """Held-out scores after `step` steps, where the run file asks for them."""
        settings = self.config.eval
        outer = step in (0, self.config.steps)
        if not (outer or (settings.every and step % settings.every == 0)):
            return
        limit = settings.tasks if outer else settings.curve_tasks
        if isinstance(self.collector, DatasetCollector):
            await self.collector.evaluate(step, limit)
        if not self.heldout:
            return
        tasks = self.heldout[: limit or None]
        temperatures = {"score": settings.temperature}
        if outer and settings.sampled:
            temperatures["sampled"] = 1.0
        epoch = self.state.epoch
        await evaluate_heldout(self.store, self.config, epoch, step, tasks, temperatures)


def is_empty(
    policies: PolicySet,
    step: int,
    metrics: Metrics,
    groups: Iterable[Group],
    discarded: Iterable[Group],
) -> bool:
    """Whether no policy has anything to learn from. `metrics` are those of the policies that learn
    in this step; discarded groups, and what the other policies could learn from, count too."""
    if metrics["rollouts/usable"]:
        return False

    def usable(names: Iterable[str], groups: Iterable[Group]) -> bool:
        rollouts = [rollout for group in groups for rollout in group.rollouts]
        rewards = {name: policies.updaters[name].algo.rewards for name in names}
        return any(valid(row, read, name) for name, read in rewards.items() for row in rollouts)

    waiting = policies.updaters.keys() - dict(policies.learning(step)).keys()
    return not (usable(policies.updaters, discarded) or usable(waiting, groups))


def failure_counts(metrics: Mapping[str, float]) -> Metrics:
    """The metrics of a step that an empty one commits."""
    kept = {
        name: value
        for name, value in metrics.items()
        if name in FAILURES or name.startswith(("rollouts/failed/", "judges/"))
    }
    return kept | {EMPTY: metrics["rollouts"]}


async def check_empty_steps(store: Store, config: RunConfig) -> None:
    """Raises TrainingError, with the commonest cause, where the last `max_empty_steps` steps were
    empty, or all of a run that is shorter."""
    rows = [row for row in await store.steps(config.name) if row.committed]
    empty = list(takewhile(lambda row: EMPTY in row.metrics, reversed(rows)))
    if not empty or len(empty) < min(config.max_empty_steps, config.steps):
        return
    again = f"the same command goes on after step {len(rows)}"
    if len(rows) == config.steps:
        again = "repeat the command with more steps, or with --fresh"
    raise TrainingError(
        f"nothing was learned in {len(empty)} steps in a row, of which no rollout could be used: "
        f"{await _cause(store, config.name, empty)}. Mend that, and {again}"
    )


async def _cause(store: Store, run: str, empty: Sequence[StepRow]) -> str:
    """What kept most rollouts of the steps from being used, in one sentence."""
    failed, purpose = RolloutState.FAILED, Purpose.TRAIN
    found = [await store.rollouts(run, purpose=purpose, step=r.step, state=failed) for r in empty]
    failures = [rollout.failure for rows in found for rollout in rows if rollout.failure]
    total, long, refused = (
        sum(int(row.metrics.get(name, 0.0)) for row in empty)
        for name in (EMPTY, "calls/too_long", "calls/refused")
    )
    if failures and (2 * len(failures) >= total or not (long or refused)):
        return commonest_failure(failures, total)
    if long and 2 * long >= refused:
        return (
            f"{long} model calls were longer than the policy's context; shorten the prompts, or "
            "choose a model that reads more"
        )
    if refused:
        return (
            f"{refused} model calls came without token ids; serve the policy with ids, or set "
            'algorithm.inexact = "retokenize"'
        )
    return (
        "no group has algorithm.min_group rollouts with a reward and with a call that a trained "
        "policy answered; look at one with `agentrl show ROLLOUT`"
    )
