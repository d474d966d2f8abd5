"""How sessions join the algorithm process: as the source of its groups."""

from __future__ import annotations

from agentrl.algorithms.train.hooks import Hooks
from agentrl.config import RunConfig


def join(config: RunConfig) -> Hooks | None:
    return None
