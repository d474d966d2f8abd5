"""Scoring the current policy on held-out tasks, through the same queue as training."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Mapping, Sequence
from statistics import fmean

from msgspec.structs import replace

from agentrl.algorithms.sampling.rollouts import evaluation_rollouts
from agentrl.config import RunConfig
from agentrl.processes import PHASE
from agentrl.store.base import Store
from agentrl.types import Json, NewRollout, Rollout, Scope

log = logging.getLogger("agentrl.algorithm")


def temperatures(config: RunConfig, step: int) -> dict[str, float]:
    """At which a policy is scored; the first and the last one also as it was sampled."""
    also = config.eval.sampled and step in (0, config.steps)
    return {"score": config.eval.temperature} | ({"sampled": 1.0} if also else {})


async def evaluate_heldout(
    store: Store,
    config: RunConfig,
    epoch: int,
    step: int,
    tasks: list[dict[str, Json]],
    temperatures: dict[str, float],
    candidate: str | None = None,
) -> None:
    """Log the scores of one rollout per task after `step` steps, as `eval/<name>` and so on for
    each named temperature, unless they are in the store already."""
    done = {row.step: row.metrics for row in await store.steps(config.name)}
    if "eval/score" in done.get(step, {}):
        return
    if step in (0, config.steps):
        after = f" after {step} steps" if config.steps else ""
        log.log(PHASE, f"scoring {len(tasks)} held-out tasks{after}")
    started = time.monotonic()
    asked = {}
    for name, temperature in temperatures.items():
        sampling = replace(config.sampling, temperature=temperature)
        asked[name] = evaluation_rollouts(config, step, name, tasks, sampling, candidate=candidate)
    metrics: dict[str, float] = {}
    for name, rollouts in (await play(store, asked)).items():
        metrics |= {f"eval/{key}": x for key, x in score_metrics(name, rollouts).items()}
    metrics["time/eval"] = time.monotonic() - started
    await store.log(config.name, step, metrics, epoch=epoch)


async def play(
    store: Store, asked: Mapping[str, Sequence[NewRollout]]
) -> dict[str, Sequence[Rollout]]:
    """The rollouts of each of `asked`, a group by name, once all of them have ended. Those that
    ended before are not played again, so a process that was killed may ask once more."""
    for rollouts in asked.values():
        await store.enqueue(rollouts)
    for rollouts in asked.values():
        await store.settled(rollouts[0].group)
    return {
        name: await store.rollouts(rollouts[0].run, group=rollouts[0].group)
        for name, rollouts in asked.items()
    }


def score_metrics(name: str, rollouts: Sequence[Rollout]) -> dict[str, float]:
    """<name>: the mean outcome; <name>/<role>: the mean of each role with its own outcome, such as
    the players of a game; <name>_missing: the number of rollouts without an outcome, such as
    crashes and time-outs, which are in no mean."""
    found: dict[str, list[float]] = {name: [rollout.reward() for rollout in rollouts]}
    for row in (row for rollout in rollouts for row in rollout.rewards):
        if row.scope is Scope.ROLE and row.name == "outcome":
            found.setdefault(f"{name}/{row.target}", []).append(row.value)
    known = {key: [x for x in values if not math.isnan(x)] for key, values in found.items()}
    missing = {f"{name}_missing": float(len(found[name]) - len(known[name]))}
    return missing | {key: fmean(values) for key, values in known.items() if values}
