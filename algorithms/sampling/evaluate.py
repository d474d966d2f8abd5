"""Scoring the current policy on held-out tasks, through the same queue as training."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from pathlib import Path
from statistics import fmean

import msgspec
from msgspec.structs import replace

from agentrl.algorithms.sampling.task_sampler import evaluation_rollouts
from agentrl.config import RunConfig
from agentrl.loading import load_tasks
from agentrl.processes import PHASE
from agentrl.store import open_store
from agentrl.store.base import Store
from agentrl.types import ENDED, Json, NewRollout, Rollout, Scope

log = logging.getLogger("agentrl.algorithm")


async def evaluate_upstreams(config: RunConfig) -> None:
    """The algorithm process of a run whose calls `[upstreams]` answer: it scores the held-out tasks
    once, because endpoints have their own sampling settings."""
    tasks = load_tasks(config.tasks.heldout, Path(config.root), key="tasks.heldout")
    temperatures = {"score": config.eval.temperature}
    async with open_store(config.store) as store:
        state = await store.open_run(config.name, msgspec.to_builtins(config))
        limit = config.eval.tasks or None
        await evaluate_heldout(store, config, state.epoch, 0, tasks[:limit], temperatures)
        await store.log(config.name, 0, {ENDED: 1.0}, epoch=state.epoch)


async def evaluate_due(
    store: Store,
    config: RunConfig,
    epoch: int,
    step: int,
    heldout: list[dict[str, Json]],
    offline: Callable[[int, int], Awaitable[None]] | None = None,
) -> None:
    """Held-out scores after `step` steps, where the run file asks for them. offline: evaluates what
    a data set holds out, given the step and the most items."""
    settings = config.eval
    outer = step in (0, config.steps)
    if not (outer or (settings.every and step % settings.every == 0)):
        return
    limit = settings.tasks if outer else settings.curve_tasks
    if offline is not None:
        await offline(step, limit)
    if not heldout:
        return
    temperatures = {"score": settings.temperature}
    if outer and settings.sampled:
        temperatures["sampled"] = 1.0
    await evaluate_heldout(store, config, epoch, step, heldout[: limit or None], temperatures)


async def evaluate_heldout(
    store: Store,
    config: RunConfig,
    epoch: int,
    step: int,
    tasks: list[dict[str, Json]],
    temperatures: dict[str, float],
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
        asked[name] = evaluation_rollouts(config, step, name, tasks, sampling)
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
