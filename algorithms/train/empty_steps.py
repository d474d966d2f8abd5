"""Empty steps, which have no usable rollout, and the end of the run after too many; and its end
after a step of which too many rollouts failed for one cause.

A step is empty if all its rollouts failed, or none has a call that can be trained. It commits its
failure counts and nothing else. The store counts empty steps in a row, so the count survives a
restart.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from itertools import takewhile
from math import isnan

from agentrl.algorithms.data.merge import valid
from agentrl.algorithms.diagnostics.metrics import Metrics, group_metrics
from agentrl.algorithms.sampling.collect import Collected
from agentrl.algorithms.sampling.evaluate import FEWEST
from agentrl.algorithms.train.policy_set import PolicySet
from agentrl.algorithms.why.sentences import cause
from agentrl.base.failures import cure_of, one_line, same_cause
from agentrl.config import RunConfig
from agentrl.errors import TrainingError
from agentrl.store.base import Store
from agentrl.types import EMPTY, ErrorKind, Group, RunState, StepCommit

# Metrics that an empty step commits, in addition to rollouts/failed/* and judges/*.
FAILURES = ("rollouts", "rollouts/failed", "calls/refused", "calls/inexact", "calls/too_long")

# Failures that the run file asks for, or that say nothing of the rest of the step.
EXPECTED = {ErrorKind.LIMIT, ErrorKind.CANCELLED}


def is_empty(policies: PolicySet, step: int, metrics: Metrics, collected: Collected) -> bool:
    """Whether no policy can train on any rollout of a step. metrics: of the policies that learn in
    it; discarded groups, and rollouts that the other policies could train on, count too."""
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
    kept = {
        name: value
        for name, value in metrics.items()
        if name in FAILURES or name.startswith(("rollouts/failed/", "judges/"))
    }
    return kept | {EMPTY: metrics["rollouts"]}


def empty_commit(
    state: RunState, policies: PolicySet, step: int, collected: Collected, metrics: Metrics
) -> StepCommit:
    """The commit of an empty step: its failure counts, without a trained group or a checkpoint, so
    the previous checkpoint stays the last."""
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
    """Raise TrainingError if more than `max_failed` of a step's rollouts failed for one cause, and
    without a reward: what is left of the step is no fair sample of the tasks."""
    groups = [*collected.groups, *collected.discarded]
    rollouts = [rollout for group in groups for rollout in group.rollouts]
    failed = [row for row in rollouts if row.failure and isnan(row.reward())]
    causes = Counter(
        same_cause(row.failure) for row in failed
        if row.failure and row.failure.kind not in EXPECTED
    )  # fmt: skip
    cause, count = next(iter(causes.most_common(1)), (None, 0))
    if count < FEWEST or count <= config.max_failed * len(rollouts):
        return
    first = next(row for row in failed if row.failure and same_cause(row.failure) == cause)
    assert first.failure is not None
    kind, message = first.failure.kind, one_line(first.failure.message)
    raise TrainingError(
        f"{count} of the {len(rollouts)} rollouts of a step failed for one cause, {kind}:"
        f" {message}. Example: agentrl show {first.id}. {cure_of(kind, message)}, and repeat the"
        f" command, which resumes; or allow more by max_failed (now {config.max_failed:g})"
    )


async def check_empty_steps(store: Store, config: RunConfig) -> None:
    """Raise TrainingError, with the most likely cause, if the last `max_empty_steps` steps
    were empty, or all steps of a shorter run."""
    rows = [row for row in await store.steps(config.name) if row.committed]
    empty = list(takewhile(lambda row: EMPTY in row.metrics, reversed(rows)))
    if not empty or len(empty) < min(config.max_empty_steps, config.steps):
        return
    reason = await cause(store, config.name, len(empty))
    again = f"the same command resumes after step {len(rows)}"
    if len(rows) == config.steps:
        again = "repeat the command with more steps, or with --fresh"
    raise TrainingError(
        f"nothing was learned in {len(empty)} steps in a row, of which no rollout could be used: "
        f"{reason}. Correct that, and {again}"
    )
