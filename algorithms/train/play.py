"""The algorithm process where nothing is learned: it serves players and has their games played.

It owns nothing that the store does not hold: the next start asks for the same rollouts, of which
those that have ended are there already.
"""

from __future__ import annotations

import asyncio
import random

import msgspec
import torch
from transformers.utils.logging import disable_progress_bar

from agentrl.algorithms.sampling.task_sampler import evaluation
from agentrl.algorithms.train.frozen_policies import serve
from agentrl.algorithms.train.load_policies import load_bases
from agentrl.algorithms.train.serving import Serving
from agentrl.config import RunConfig
from agentrl.config import policies as team
from agentrl.config.evaluation_plan import EvaluationPlan
from agentrl.store import open_store
from agentrl.store.base import Store


def main(config: RunConfig, plan: EvaluationPlan) -> None:
    """Play a plan to the end."""
    asyncio.run(run(config, plan))


async def run(config: RunConfig, plan: EvaluationPlan) -> None:
    """Serve the run's policies and the players, then have every lineup play every task.

    Raises PolicyError for a player that cannot be served."""
    disable_progress_bar()  # the view is the only one
    random.seed(config.seed)
    torch.manual_seed(config.seed)
    async with open_store(config.store) as store:
        state = await store.open_run(config.name, msgspec.to_builtins(config))
        bases = load_bases(config)
        serving = Serving(config, bases)
        await serving.start()
        try:
            async with serving.updating():
                await serving.publish(dict.fromkeys(team.trained_policies(config), plan.steps))
                await serve(config, bases, serving, plan.players)
            await serving.announce(store, config.name, state.epoch)
            await play(store, config, plan)
        finally:
            await serving.close()


async def play(store: Store, config: RunConfig, plan: EvaluationPlan) -> None:
    """Returns when every rollout of the plan has ended."""
    sampling = msgspec.structs.replace(config.sampling, temperature=plan.temperature)
    groups = []
    for name, seats in plan.lineups.items():
        rollouts = evaluation(config, 0, name, plan.tasks, sampling, seats)
        await store.enqueue(rollouts)
        groups.append(rollouts[0].group)
    for group in groups:
        await store.settled(group)
