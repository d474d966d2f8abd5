"""Scoring the current policy on held-out tasks, through the same queue as training."""

from __future__ import annotations

import math
from statistics import fmean

from msgspec.structs import replace

from agentrl.algorithms.requests import evaluation
from agentrl.config import RunConfig
from agentrl.store.base import Store
from agentrl.types import Json


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
