"""Held-out evaluation of the current policy, through the same queue as training."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Mapping, Sequence

from msgspec.structs import replace

from agentrl.algorithms.sampling.rollouts import evaluation_rollouts
from agentrl.algorithms.sampling.scores import (
    common_score,
    few_tasks,
    score_metrics,
    spread_metrics,
)
from agentrl.base.failures import commonest_message, cure_of
from agentrl.base.processes import log_phase
from agentrl.changes import trial_name
from agentrl.config import RunConfig
from agentrl.config.policies import has_no_own_policy
from agentrl.errors import TrainingError
from agentrl.store.base import Store
from agentrl.store.records import GroupRow
from agentrl.types import ErrorKind, Json, NewRollout, Purpose, Rollout

NO_NUMBER = "VerifierError: the verifier returned"  # start of the message of such a failure
FEWEST = 4  # rollouts that fail alike by more than chance
MOST_TRIALS = 1000  # groups of evaluations before the first step
log = logging.getLogger("agentrl.algorithm")


def temperatures(config: RunConfig, step: int) -> dict[str, float]:
    """The temperatures of an evaluation, by metric name. Before and after training there is also
    one at temperature 1, but not for upstreams, which have sampling settings of their own."""
    also = config.eval.sampled and step in (0, config.steps) and not has_no_own_policy(config)
    return {"score": config.eval.temperature} | ({"sampled": 1.0} if also else {})


async def evaluate_heldout(
    store: Store,
    config: RunConfig,
    epoch: int,
    step: int,
    tasks: list[dict[str, Json]],
    candidate: str | None = None,
    seats: Mapping[str, str] = {},
) -> None:
    """Log the scores on `tasks` after `step` steps, as `eval/<name>` for each of `temperatures`,
    unless the store has them already. Each task is rolled out once; before and after training
    `eval.samples` times at the last temperature. seats: role or policy -> policy that plays it.
    Raises TrainingError, before the first step, if all rollouts fail for one cause; they are played
    again by the next start, before which the cause may be fixed."""
    done = {row.step: row.metrics for row in await store.steps(config.name)}
    if "eval/score" in done.get(step, {}):
        return
    outer = step in (0, config.steps)
    if outer:
        after = f" after {step} steps" if config.steps else ""
        log_phase(log, f"scoring {len(tasks)} held-out tasks{after}")
        if step == 0 and (said := few_tasks(len(tasks))):
            log_phase(log, said)
    trial = await failed_trials(store, config.name) if step == 0 else 0
    started = time.monotonic()
    requested, named = {}, temperatures(config, step)
    for name, temperature in named.items():
        sampling = replace(config.sampling, temperature=temperature)
        repeated = tasks * (config.eval.samples if outer and name == [*named][-1] else 1)
        requested[name] = evaluation_rollouts(
            config, step, trial_name(name, trial), repeated, sampling, seats, candidate
        )
    metrics = {"eval/tasks": float(len(tasks))}
    played = await play(store, requested)
    if step == 0 and config.steps:
        check_first(config, [row for rollouts in played.values() for row in rollouts])
    for name, rollouts in played.items():
        own = score_metrics(name, rollouts) | spread_metrics(name, rollouts, len(tasks), config)
        metrics |= {f"eval/{key}": x for key, x in own.items()}
    metrics |= common_score(config, played["score"], len(tasks))
    metrics["time/eval"] = time.monotonic() - started
    await store.log(config.name, step, metrics, epoch=epoch)


def check_first(
    config: RunConfig, rollouts: Sequence[Rollout], *, unchanged_only: bool = False
) -> None:
    """Raise TrainingError if all of a run's first rollouts failed for one cause, and without a
    reward to learn from. unchanged_only: only if the verifier returned no number, which no
    repetition changes."""
    failures = [row.failure for row in rollouts if row.failure and math.isnan(row.reward())]
    if not failures or len(failures) < len(rollouts):
        return
    same_kind = len({failure.kind for failure in failures}) == 1
    no_number = all(failure.message.startswith(NO_NUMBER) for failure in failures)
    if not no_number and (unchanged_only or not same_kind or len(failures) < FEWEST):
        return
    kind, message = failures[0].kind, commonest_message(failures)
    why = f" by {kind}: {message}"
    if kind is ErrorKind.VERIFIER:
        name, message = config.verifier.path, message.removeprefix("VerifierError: ")
        why = f", because of {name}: {message}" if name else f", because of {message}"
    raise TrainingError(
        f"all {len(rollouts)} rollouts failed{why}. Example: agentrl show {rollouts[0].id}."
        f" {cure_of(kind, message)}, and repeat the command"
    )


async def failed_trials(store: Store, run: str) -> int:
    """How many evaluations before the first step ended the run, because every rollout failed."""
    rows = await store.groups(run, purpose=Purpose.EVAL, step=0, limit=MOST_TRIALS)
    trials: dict[str, list[GroupRow]] = {}
    for row in rows:
        trials.setdefault(row.id.rpartition("/")[2].partition(".")[2], []).append(row)
    return sum(all(map(all_failed, groups)) for groups in trials.values())


def all_failed(group: GroupRow) -> bool:
    """Whether every rollout failed, without a reward."""
    return 0 < group.n == group.failed and all(outcome is None for outcome in group.outcomes)


async def play(
    store: Store, requested: Mapping[str, Sequence[NewRollout]]
) -> dict[str, Sequence[Rollout]]:
    """Request groups by name and wait for them to end; returns their rollouts. Rollouts that have
    ended before do not run again, so a restarted process may repeat the request."""
    for rollouts in requested.values():
        await store.enqueue(rollouts)
    for rollouts in requested.values():
        await store.settled(rollouts[0].group)
    return {
        name: await store.rollouts(rollouts[0].run, group=rollouts[0].group)
        for name, rollouts in requested.items()
    }
