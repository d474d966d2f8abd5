"""Records as a store would return them, with what a test does not care about filled in."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from agentrl.types import (
    Group,
    Purpose,
    Reward,
    Rollout,
    RolloutState,
    Transition,
    float32,
    int32,
)


def call(
    id: str, prompt: Iterable[int] = (), completion: Iterable[int] = (), **fields: Any
) -> Transition:
    """A call of an attempt `a`; each of its tokens had log-probability -1, unless given."""
    tokens = int32(completion)
    known: dict[str, Any] = {"attempt": "a", "index": 0, "logprobs": float32([-1.0] * len(tokens))}
    return Transition(id=id, prompt=int32(prompt), completion=tokens, **known | fields)


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


def group(*rollouts: Rollout, id: str = "g", step: int = 0) -> Group:
    return Group(id=id, run="run", step=step, rollouts=list(rollouts))
