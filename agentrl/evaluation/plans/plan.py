"""Which games frozen policies play."""

from __future__ import annotations

import msgspec

from agentrl.config.policies import FrozenPolicy, Seats
from agentrl.types import Json


class EvaluationPlan(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Lineups that all play the same tasks once, so two of them differ only in their players."""

    players: dict[str, FrozenPolicy]
    lineups: dict[str, Seats]  # by name, which contains no slash
    tasks: list[dict[str, Json]]
    temperature: float
    steps: int  # of training of the run's policies
