"""Scoring the current policy on held-out tasks, through the same queue as training."""

from __future__ import annotations

import math

from agentrl.algorithms.requests import evaluation
from agentrl.config import RunConfig
from agentrl.store.base import Store
from agentrl.types import Json, Sampling


async def score(
    store: Store,
    config: RunConfig,
    step: int,
    name: str,
    tasks: list[dict[str, Json]],
    sampling: Sampling,
) -> dict[str, float]:
    """Mean outcome of one rollout per task after `step` steps, as `eval/<name>`.

    Rollouts without a reward (crashes, time-outs) are not in the mean but counted as
    `eval/<name>_missing`. Asking again for the same step finds the finished rollouts."""
    rollouts = evaluation(config, step, name, tasks, sampling)
    await store.enqueue(rollouts)
    group = rollouts[0].group
    await store.settled(group)
    rewards = [row.reward() for row in await store.rollouts(config.name, group=group)]
    known = [reward for reward in rewards if not math.isnan(reward)]
    scores = {f"eval/{name}_missing": float(len(rewards) - len(known))}
    if known:
        scores[f"eval/{name}"] = math.fsum(known) / len(known)
    return scores
