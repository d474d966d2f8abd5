"""Held-out evaluation of the current policy, through the same queue as training."""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping, Sequence

from msgspec.structs import replace

from agentrl.algorithms.sampling.rollouts import evaluation_rollouts
from agentrl.algorithms.sampling.scores import common_score, score_metrics, spread_metrics
from agentrl.base.processes import log_phase
from agentrl.config import RunConfig
from agentrl.config.policies import has_no_own_policy
from agentrl.errors import TrainingError
from agentrl.store.base import Store
from agentrl.types import Json, NewRollout, Rollout

NO_NUMBER = "VerifierError: the verifier returned"  # start of the message of such a failure
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
    Raises TrainingError, before the first step, if the verifier returns no number."""
    done = {row.step: row.metrics for row in await store.steps(config.name)}
    if "eval/score" in done.get(step, {}):
        return
    outer = step in (0, config.steps)
    if outer:
        after = f" after {step} steps" if config.steps else ""
        log_phase(log, f"scoring {len(tasks)} held-out tasks{after}")
    started = time.monotonic()
    requested, named = {}, temperatures(config, step)
    for name, temperature in named.items():
        sampling = replace(config.sampling, temperature=temperature)
        repeated = tasks * (config.eval.samples if outer and name == [*named][-1] else 1)
        requested[name] = evaluation_rollouts(
            config, step, name, repeated, sampling, seats, candidate
        )
    metrics: dict[str, float] = {}
    played = await play(store, requested)
    if step == 0 and config.steps:
        check_verifier(config, [row for rollouts in played.values() for row in rollouts])
    for name, rollouts in played.items():
        own = score_metrics(name, rollouts) | spread_metrics(name, rollouts, len(tasks), config)
        metrics |= {f"eval/{key}": x for key, x in own.items()}
    metrics |= common_score(config, played["score"], len(tasks))
    metrics["time/eval"] = time.monotonic() - started
    await store.log(config.name, step, metrics, epoch=epoch)


def check_verifier(config: RunConfig, rollouts: Sequence[Rollout]) -> None:
    """Raise TrainingError if the verifier returned no number for any of a run's first rollouts,
    which no repetition changes."""
    said = {rollout.failure.message if rollout.failure else "" for rollout in rollouts}
    if said and all(message.startswith(NO_NUMBER) for message in said):
        why, name = min(said).removeprefix("VerifierError: "), config.verifier.path
        where = f"{name}: " if name else ""
        raise TrainingError(
            f"all {len(rollouts)} rollouts failed, because of {where}{why}. Example: agentrl show"
            f" {rollouts[0].id}. Correct it, and repeat the command with --fresh"
        )


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
