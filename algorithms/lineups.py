"""The algorithm process where nothing is learned: it serves players and has their games played.

It owns nothing that the store does not hold: the next start asks for the same rollouts, of which
those that have ended are there already.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence
from pathlib import Path

import msgspec
import torch
from transformers.utils.logging import disable_progress_bar

from agentrl import team
from agentrl.algorithms.checkpoint import atomic_directory
from agentrl.algorithms.policies import Base, load_bases
from agentrl.algorithms.requests import evaluation
from agentrl.algorithms.serving import Serving
from agentrl.config import RunConfig
from agentrl.errors import PolicyError
from agentrl.lineups import Plan, Player
from agentrl.store import open_store
from agentrl.store.base import Store


def main(config: RunConfig, plan: Plan) -> None:
    """Play a plan to the end."""
    asyncio.run(run(config, plan))


async def run(config: RunConfig, plan: Plan) -> None:
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
                await serving.publish(dict.fromkeys(team.trained(config), plan.steps))
                for name, player in plan.players.items():
                    directory = _directory(config, bases, name, player)
                    await serving.freeze(name, directory, player.steps)
            await serving.announce(store, config.name, state.epoch)
            await play(store, config, plan)
        finally:
            await serving.close()


async def play(store: Store, config: RunConfig, plan: Plan) -> None:
    """Returns when every rollout of the plan has ended."""
    sampling = msgspec.structs.replace(config.sampling, temperature=plan.temperature)
    groups = []
    for name, seats in plan.lineups.items():
        rollouts = evaluation(config, 0, name, plan.tasks, sampling, seats)
        await store.enqueue(rollouts)
        groups.append(rollouts[0].group)
    for group in groups:
        await store.settled(group)


def _directory(config: RunConfig, bases: Sequence[Base], name: str, player: Player) -> Path:
    """Where a player's weights are; those of an adapter that was never trained are made."""
    if player.directory:
        return Path(player.directory)
    base = next(base for base in bases if player.policy in base.policies)
    if base.adapters is None:
        raise PolicyError(f"{name}: {player.policy!r} is no adapter, so it began with a model")
    lora = team.view(config, player.policy).policy.lora
    base.adapters.add(
        name, rank=lora.rank, alpha=lora.alpha, targets=lora.targets, seed=config.seed
    )
    path = Path(config.output, "players", name)
    with atomic_directory(path) as partial:
        base.adapters.save(name, partial)
    base.adapters.close(name)
    return path
