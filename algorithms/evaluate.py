"""Scoring the current policy on held-out tasks, through the same queue as training."""

from __future__ import annotations

import math
import time
from pathlib import Path
from statistics import fmean

import msgspec
from msgspec.structs import replace

from agentrl.algorithms.requests import evaluation
from agentrl.config import RunConfig
from agentrl.loading import load_tasks
from agentrl.store import open_store
from agentrl.store.base import Store
from agentrl.types import Json


async def remote(config: RunConfig) -> None:
    """The algorithm process of a run without a model of its own: has the held-out tasks played,
    once, because endpoints keep their own sampling."""
    tasks = load_tasks(config.tasks.heldout, Path(config.root), key="tasks.heldout")
    temperatures = {"score": config.eval.temperature}
    async with open_store(config.store) as store:
        state = await store.open_run(config.name, msgspec.to_builtins(config))
        limit = config.eval.tasks or None
        await held_out(store, config, state.epoch, 0, tasks[:limit], temperatures)


async def held_out(
    store: Store,
    config: RunConfig,
    epoch: int,
    step: int,
    tasks: list[dict[str, Json]],
    temperatures: dict[str, float],
) -> None:
    """Log what `score` finds after `step` steps, if an earlier start has not."""
    done = {row.step: row.metrics for row in await store.steps(config.name)}
    if "eval/score" in done.get(step, {}):
        return
    started = time.monotonic()
    metrics = await score(store, config, step, tasks, temperatures)
    metrics["time/eval"] = time.monotonic() - started
    await store.log(config.name, step, metrics, epoch=epoch)


async def score(
    store: Store,
    config: RunConfig,
    step: int,
    tasks: list[dict[str, Json]],
    temperatures: dict[str, float],
) -> dict[str, float]:
    """Mean outcome of one rollout per task after `step` steps, as `eval/<name>` for each named
    temperature.

    Rollouts without a reward (crashes, time-outs) are not in the mean but counted as
    `eval/<name>_missing`. Asking again for the same step finds the finished rollouts."""
    groups = {}
    for name, temperature in temperatures.items():
        sampling = replace(config.sampling, temperature=temperature)
        rollouts = evaluation(config, step, name, tasks, sampling)
        await store.enqueue(rollouts)
        groups[name] = rollouts[0].group
    scores = {}
    for name, group in groups.items():
        await store.settled(group)
        rewards = [row.reward() for row in await store.rollouts(config.name, group=group)]
        known = [reward for reward in rewards if not math.isnan(reward)]
        scores[f"eval/{name}_missing"] = float(len(rewards) - len(known))
        if known:
            scores[f"eval/{name}"] = fmean(known)
    return scores
