"""Empty steps, in which no rollout could be trained, and when there were too many of them.

A step is empty if all its rollouts failed, or none has a call that can be trained. It commits its
failure counts and nothing else. How many came in a row is read from the store, so it is right after
a restart too.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import takewhile

from agentrl.algorithms.data.merge import valid
from agentrl.algorithms.diagnostics.metrics import Metrics
from agentrl.algorithms.train.policy_set import PolicySet
from agentrl.config import RunConfig
from agentrl.errors import TrainingError
from agentrl.failures import commonest_failure
from agentrl.store.base import Store
from agentrl.types import EMPTY, Failure, Group, Purpose, RolloutState, StepRow

KEPT = ("rollouts", "rollouts/failed", "calls/refused", "calls/inexact", "calls/too_long")


def is_empty(
    team: PolicySet,
    step: int,
    metrics: Metrics,
    groups: Iterable[Group],
    discarded: Iterable[Group],
) -> bool:
    """Whether no policy has anything to learn from. `metrics`: of those whose turn it was; what
    these did without, and what there is for the others, is asked of the groups."""
    if metrics["rollouts/usable"]:
        return False
    at_turn = dict(team.learning(step))
    waiting = team.updaters.keys() - at_turn.keys()
    return not (_usable(team, team.updaters, discarded) or _usable(team, waiting, groups))


def _usable(team: PolicySet, policies: Iterable[str], groups: Iterable[Group]) -> bool:
    rollouts = [rollout for group in groups for rollout in group.rollouts]
    rewards = {name: team.updaters[name].algo.rewards for name in policies}
    return any(valid(row, names, name) for name, names in rewards.items() for row in rollouts)


def failure_counts(metrics: Mapping[str, float]) -> Metrics:
    """What of a step's metrics an empty one commits."""
    kept = {
        name: value
        for name, value in metrics.items()
        if name in KEPT or name.startswith("rollouts/failed/")
    }
    return kept | {EMPTY: metrics["rollouts"]}


async def check(store: Store, config: RunConfig) -> None:
    """Raises TrainingError, with the commonest cause, where the last `max_empty_steps` steps were
    empty, or all of a run that is shorter."""
    rows = [row for row in await store.steps(config.name) if row.committed]
    empty = list(takewhile(lambda row: EMPTY in row.metrics, reversed(rows)))
    if not empty or len(empty) < min(config.max_empty_steps, config.steps):
        return
    over = len(rows) == config.steps
    again = (
        "repeat the command with more steps, or with --fresh"
        if over
        else f"the same command goes on after step {len(rows)}"
    )
    raise TrainingError(
        f"nothing was learned in {len(empty)} steps in a row, of which no rollout could be used: "
        f"{await _cause(store, config, empty)}. Mend that, and {again}"
    )


async def _cause(store: Store, config: RunConfig, empty: Sequence[StepRow]) -> str:
    """What kept most rollouts of the steps from being used, in one sentence."""
    failures: list[Failure] = []
    for row in empty:
        failed = await store.rollouts(
            config.name, purpose=Purpose.TRAIN, step=row.step, state=RolloutState.FAILED
        )
        failures += [rollout.failure for rollout in failed if rollout.failure]
    total = sum(int(row.metrics[EMPTY]) for row in empty)
    if 2 * len(failures) >= total and failures:
        return commonest_failure(failures, total)
    long, refused = (_sum(empty, name) for name in ("calls/too_long", "calls/refused"))
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
    if failures:
        return commonest_failure(failures, total)
    return (
        "no group has algorithm.min_group rollouts with a reward and with a call that a trained "
        "policy answered; look at one with `agentrl show ROLLOUT`"
    )


def _sum(rows: Iterable[StepRow], name: str) -> int:
    return sum(int(row.metrics.get(name, 0.0)) for row in rows)
