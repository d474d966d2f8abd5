"""Who plays which role, side by side: what the front asks the algorithm process to play.

A player is a policy as it was after some training; a lineup gives roles to players, and every
lineup plays the same tasks, so that what differs between two of them is who plays.
"""

from __future__ import annotations

from pathlib import Path

import msgspec

from agentrl.config import policies
from agentrl.config.schema import RunConfig
from agentrl.types import Json

Seats = dict[str, str]  # role -> player, or a policy of the run


class FrozenPolicy(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A policy that plays and does not learn. Of an empty directory: the policy's adapter as
    training began with it, which changes nothing."""

    policy: str
    directory: str  # of a model or an adapter, or a model's hub name
    steps: int  # that it was trained for: its version


class EvaluationPlan(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What is played: `tasks` once by each of `lineups`, which name `players` or policies of the
    run, at one temperature."""

    players: dict[str, FrozenPolicy]
    lineups: dict[str, Seats]  # by names without a slash
    tasks: list[dict[str, Json]]
    temperature: float
    steps: int  # that the run's own policies were trained for


def initial_version(config: RunConfig, policy: str) -> tuple[str, FrozenPolicy]:
    """A policy as training began with it, and its name."""
    own = policies.view(config, policy).policy
    if own.lora.rank or own.lora.adapter:
        directory = str(config.path(own.lora.adapter)) if own.lora.adapter else ""
    else:
        made = config.path(own.model) if own.model else Path(config.output, "policy")
        directory = str(made) if made.is_dir() else own.model
    return policies.initial_name(policy), FrozenPolicy(policy=policy, directory=directory, steps=0)
