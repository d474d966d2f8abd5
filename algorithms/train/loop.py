"""The training loop: claim groups, compute credit, update, commit, publish, evaluate.

All of its state is in the store or the last checkpoint, so it may be killed at any moment: the next
start continues after that checkpoint (`saving.py`). It does not know which algorithm it runs, nor
which features the run has: it calls each of them by the methods of `features.py`.

A step is empty, without a usable rollout, if all its rollouts failed, or none has a call that can
be trained. It commits its failure counts and nothing else. The run ends after too many empty steps,
and after a step in which too many rollouts failed for one cause. The store counts empty steps in a
row, so the count survives a restart.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import takewhile
from math import isnan

from msgspec import structs

from agentrl.algorithms.data.merge import valid
from agentrl.algorithms.proof import announce_tried
from agentrl.algorithms.sampling.collect import Collected, GroupSource, settle_groups_ahead
from agentrl.algorithms.sampling.evaluate import MIN_ALIKE_FAILURES, check_first
from agentrl.algorithms.train.features import Feature, ServedRun
from agentrl.algorithms.train.metrics import Metrics, group_metrics, throughput
from agentrl.algorithms.train.policies import PolicySet
from agentrl.algorithms.train.saving import Checkpoints, HeldoutEvaluator
from agentrl.algorithms.why import cause
from agentrl.core.config import RunConfig
from agentrl.core.errors import TrainingError
from agentrl.core.types import (
    EMPTY,
    ErrorKind,
    Group,
    RunState,
    StepCommit,
    StepReward,
    fix_hint,
    one_line,
    same_cause,
)
from agentrl.store.base import Store

MAX_FAILED = 0.5  # share of a step's rollouts that may fail for one cause
# Consecutive; a single one may be chance, but each costs as much as a useful one.
MAX_EMPTY_STEPS = 3
# Metrics that an empty step commits, in addition to rollouts/failed/* and judges/*.
FAILURES = ("rollouts", "rollouts/failed", "calls/refused", "calls/inexact", "calls/too_long")

# Failures that the run file causes, or that are not evidence about other rollouts.
EXPECTED = {ErrorKind.LIMIT, ErrorKind.CANCELLED}


def is_empty(policies: PolicySet, step: int, metrics: Metrics, collected: Collected) -> bool:
    """Whether no policy can train on any rollout of a step. metrics: of the policies that learn in
    the step; discarded groups, and rollouts that other policies could train on, count, too."""
    if metrics["rollouts/usable"]:
        return False

    def usable(names: Iterable[str], groups: Iterable[Group]) -> bool:
        rollouts = [rollout for group in groups for rollout in group.rollouts]
        rewards = {name: policies.updaters[name].algo.rewards for name in names}
        return any(valid(row, read, name) for name, read in rewards.items() for row in rollouts)

    waiting = policies.updaters.keys() - dict(policies.learning(step)).keys()
    return not (usable(policies.updaters, collected.discarded) or usable(waiting, collected.groups))


def failure_counts(metrics: Mapping[str, float]) -> Metrics:
    """Select the metrics that an empty step commits."""
    counts = {
        name: value
        for name, value in metrics.items()
        if name in FAILURES or name.startswith(("rollouts/failed/", "judges/"))
    }
    return counts | {EMPTY: metrics["rollouts"]}


def empty_commit(
    state: RunState, policies: PolicySet, step: int, collected: Collected, metrics: Metrics
) -> StepCommit:
    """The commit of an empty step: its failure counts, without a trained group or a checkpoint, so
    the previous checkpoint remains the last."""
    groups = [*(collected.groups if collected.stored else []), *collected.discarded]
    return StepCommit(
        run=state.run,
        epoch=state.epoch,
        step=step,
        groups=[],
        discarded=[group.id for group in groups],
        versions=policies.versions(step + 1),
        checkpoint=None,
        metrics=failure_counts(metrics | group_metrics(groups)),
    )


def check_failed(config: RunConfig, collected: Collected) -> None:
    """Raise TrainingError if more than MAX_FAILED of a step's rollouts failed for one cause and
    have no reward, because the rest of the step is a biased sample of the tasks."""
    groups = [*collected.groups, *collected.discarded]
    rollouts = [rollout for group in groups for rollout in group.rollouts]
    failed = [row for row in rollouts if row.failure and isnan(row.reward())]
    causes = Counter(
        same_cause(row.failure) for row in failed
        if row.failure and row.failure.kind not in EXPECTED
    )  # fmt: skip
    cause, count = next(iter(causes.most_common(1)), (None, 0))
    if count < MIN_ALIKE_FAILURES or count <= MAX_FAILED * len(rollouts):
        return
    first = next(row for row in failed if row.failure and same_cause(row.failure) == cause)
    assert first.failure is not None
    kind, message = first.failure.kind, one_line(first.failure.message)
    raise TrainingError(
        f"{count} of the {len(rollouts)} rollouts of a step failed for one cause, {kind}:"
        f" {message}. Example: agentrl show {first.id}. {fix_hint(kind, message)}, and repeat the"
        " command, which resumes"
    )


async def check_empty_steps(store: Store, config: RunConfig) -> None:
    """Raise TrainingError, with the most likely cause, if the last MAX_EMPTY_STEPS steps were
    empty, or all steps of a shorter run. A live run waits for better sessions."""
    if config.live.running:
        return
    rows = [row for row in await store.steps(config.name) if row.committed]
    empty = list(takewhile(lambda row: EMPTY in row.metrics, reversed(rows)))
    if not empty or len(empty) < min(MAX_EMPTY_STEPS, config.steps):
        return
    reason = await cause(store, config.name, len(empty))
    again = f"the same command resumes after step {len(rows)}"
    if len(rows) == config.steps:
        again = "rerun the command with more steps, or with --fresh"
    raise TrainingError(
        f"nothing was learned in {len(empty)} steps in a row, of which no rollout could be used: "
        f"{reason}. Correct that, and {again}"
    )


@dataclass(frozen=True, slots=True)
class TrainingLoop:
    """Trains a run with running servers."""

    live: ServedRun
    source: GroupSource
    heldout: HeldoutEvaluator
    features: Sequence[Feature]

    async def run(self) -> None:
        """Train from the last checkpoint to the run file's last step."""
        live, first = self.live, self.live.state.step
        await live.serving.announce(live.store, live.config.name, live.state.epoch)
        await self.evaluate(first)
        checkpoints = Checkpoints(live)
        updated = time.monotonic()
        for step in range(first, live.config.steps):
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
            if step == first:
                announce_tried(live.config, live.models, groups)
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
                    # State that is not in the checkpoint would be lost by a restart.
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
                    claimed_groups = [*collected.groups, *collected.discarded]
                    rollouts = [rollout for group in claimed_groups for rollout in group.rollouts]
                    check_first(live.config, rollouts, unchanged_only=True)
                await check_empty_steps(live.store, live.config)
            check_failed(live.config, collected)
            await live.serving.announce(live.store, live.config.name, live.state.epoch)
            await self.evaluate(step + 1)
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

    async def evaluate(self, step: int) -> None:
        """Evaluate after `step` steps, if due."""
        live, settings = self.live, self.live.config.eval
        outer = step in (0, live.config.steps)
        if not (outer or (settings.every and step % settings.every == 0)):
            return
        for feature in self.features:
            await feature.evaluate(step, settings.tasks if outer else settings.curve_tasks)
        await self.heldout.score(step)
