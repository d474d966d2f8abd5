"""Policies as they were after some training, served beside those of the run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from agentrl.algorithms.train.load_policies import Base
from agentrl.algorithms.train.serving import Serving
from agentrl.config import RunConfig
from agentrl.config import policies as team
from agentrl.config.evaluation_plan import FrozenPolicy
from agentrl.errors import PolicyError
from agentrl.files import atomic_directory


async def serve(
    config: RunConfig, bases: Sequence[Base], serving: Serving, players: Mapping[str, FrozenPolicy]
) -> None:
    """Serve players by their names. Call inside `serving.updating`.

    Raises PolicyError for one that cannot be served."""
    for name, player in players.items():
        await serving.freeze(name, _directory(config, bases, name, player), player.steps)


def _directory(config: RunConfig, bases: Sequence[Base], name: str, player: FrozenPolicy) -> Path:
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
