"""Steps without one usable rollout: which they are, and when they end the run.

A step is empty if all its rollouts failed, or none has a call that can be trained. It commits its
failure counts and nothing else. How many came in a row is read from the store, so it is right after
a restart too.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from itertools import takewhile

from agentrl.algorithms.data.merge import valid
from agentrl.algorithms.diagnostics import why
from agentrl.algorithms.diagnostics.metrics import Metrics, group_metrics
from agentrl.algorithms.sampling.collect import Collected
from agentrl.algorithms.train.policy_set import PolicySet
from agentrl.config import RunConfig
from agentrl.errors import TrainingError
from agentrl.store.base import Store
from agentrl.types import EMPTY, Group, RunState, StepCommit

# Metrics that an empty step commits, besides rollouts/failed/*.
FAILURES = ("rollouts", "rollouts/failed", "calls/refused", "calls/inexact", "calls/too_long")


def is_empty(policies: PolicySet, step: int, metrics: Metrics, collected: Collected) -> bool:
    """Whether no policy has anything to learn from. `metrics` are those of the policies that learn
    in this step; discarded groups, and what the other policies could learn from, count too."""
    if metrics["rollouts/usable"]:
        return False

    def usable(names: Iterable[str], groups: Iterable[Group]) -> bool:
        rollouts = [rollout for group in groups for rollout in group.rollouts]
        rewards = {name: policies.updaters[name].algo.rewards for name in names}
        return any(valid(row, read, name) for name, read in rewards.items() for row in rollouts)

    waiting = policies.updaters.keys() - dict(policies.learning(step)).keys()
    return not (usable(policies.updaters, collected.discarded) or usable(waiting, collected.groups))


def failure_counts(metrics: Mapping[str, float]) -> Metrics:
    """The metrics of a step that an empty one commits."""
    kept = {
        name: value
        for name, value in metrics.items()
        if name in FAILURES or name.startswith(("rollouts/failed/", "judges/"))
    }
    return kept | {EMPTY: metrics["rollouts"]}


def empty_commit(
    state: RunState, policies: PolicySet, step: int, collected: Collected, metrics: Metrics
) -> StepCommit:
    """Commits the failure counts of an empty step. It trains no group and writes no checkpoint, so
    the one before it stays the last."""
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


async def check_empty_steps(store: Store, config: RunConfig) -> None:
    """Raises TrainingError, with the commonest cause, where the last `max_empty_steps` steps were
    empty, or all of a run that is shorter."""
    rows = [row for row in await store.steps(config.name) if row.committed]
    empty = list(takewhile(lambda row: EMPTY in row.metrics, reversed(rows)))
    if not empty or len(empty) < min(config.max_empty_steps, config.steps):
        return
    record, *_ = (await why.read(store, config.name, last=len(empty))).values()
    cause, *_ = why.reasons(record) or [why.missing_rewards(record)]
    again = f"the same command goes on after step {len(rows)}"
    if len(rows) == config.steps:
        again = "repeat the command with more steps, or with --fresh"
    raise TrainingError(
        f"nothing was learned in {len(empty)} steps in a row, of which no rollout could be used: "
        f"{cause.text}. Look at {cause.change}. Mend that, and {again}"
    )
