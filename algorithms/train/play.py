"""The algorithm process of an evaluation plan: it serves frozen policies and plays their games.

Everything it knows is in the store: a process that starts again asks for the same rollouts, and
those that have ended are not played again.
"""

from __future__ import annotations

import asyncio
import random

import msgspec
import torch
from transformers.utils.logging import disable_progress_bar

from agentrl.algorithms.sampling.evaluate import play
from agentrl.algorithms.sampling.task_sampler import evaluation_rollouts
from agentrl.algorithms.train.load_policies import load_policies
from agentrl.algorithms.train.serving import PolicyServers
from agentrl.config import RunConfig
from agentrl.config.policies import EvaluationPlan, trained_policies
from agentrl.store import open_store


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
        bases = load_policies(config)
        serving = PolicyServers(config, bases)
        await serving.start()
        try:
            async with serving.updating():
                await serving.publish(dict.fromkeys(trained_policies(config), plan.steps))
                await serving.serve_frozen(plan.players)
            await serving.announce(store, config.name, state.epoch)
            sampling = msgspec.structs.replace(config.sampling, temperature=plan.temperature)
            asked = {
                name: evaluation_rollouts(config, 0, name, plan.tasks, sampling, seats)
                for name, seats in plan.lineups.items()
            }
            await play(store, asked)
        finally:
            await serving.close()
