"""Records as a store would return them, with what a test does not care about filled in."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from agentrl.types import Purpose, Reward, Rollout, RolloutState, Transition


def rollout(
    id: str = "r", calls: Iterable[Transition] = (), rewards: Iterable[Reward] = (), **fields: Any
) -> Rollout:
    """A rollout for training whose only attempt, of the same name, has succeeded."""
    known: dict[str, Any] = {
        "run": "run", "group": "g", "index": 0, "task": {}, "purpose": Purpose.TRAIN,
        "state": RolloutState.SUCCEEDED, "step": 0, "attempts": 1, "attempt": id, "result": None,
        "failure": None, "rewards": list(rewards), "transitions": list(calls),
    }  # fmt: skip
    return Rollout(id=id, **known | fields)
