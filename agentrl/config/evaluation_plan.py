"""Evaluation plans: which frozen policies play which roles, on which tasks.

A lineup assigns roles to policies. All lineups of a plan play the same tasks, so two of them differ
only in who plays.
"""

from __future__ import annotations

from pathlib import Path

import msgspec

from agentrl.config import policies
from agentrl.config.schema import RunConfig
from agentrl.types import Json

Seats = dict[str, str]  # role -> player, or a policy of the run


class FrozenPolicy(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A policy that plays and does not learn. An empty directory means the policy's untrained
    adapter."""

    policy: str
    directory: str  # of a model or an adapter, or a model's hub name
    steps: int  # of training: its version


class EvaluationPlan(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Each lineup plays each task once, at one temperature. Lineups name `players` or policies of
    the run."""

    players: dict[str, FrozenPolicy]
    lineups: dict[str, Seats]  # by names without a slash
    tasks: list[dict[str, Json]]
    temperature: float
    steps: int  # of training of the run's own policies


def initial_version(config: RunConfig, policy: str) -> tuple[str, FrozenPolicy]:
    """A policy as training began with it, and its name."""
    own = policies.view(config, policy).policy
    if own.lora.rank or own.lora.adapter:
        directory = str(config.path(own.lora.adapter)) if own.lora.adapter else ""
    else:
        made = config.path(own.model) if own.model else Path(config.output, "policy")
        directory = str(made) if made.is_dir() else own.model
    return policies.initial_name(policy), FrozenPolicy(policy=policy, directory=directory, steps=0)
