"""Games without a run, and checkpoints without a policy, to evaluate."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from agentrl.core.config import RunConfig, resolve
from agentrl.core.config.derived import FrozenPolicy
from agentrl.core.types import Purpose, Reward, Rollout, Scope
from tests import factories

ROLES = ["first", "second"]
PLAYERS = {name: FrozenPolicy(policy="policy", directory="", steps=0) for name in "ab"}


def game(*values: float, outcome: float | None = None, **changed: Any) -> Rollout:
    """A game in which the roles got these returns."""
    rewards = [
        Reward(value=value, scope=Scope.ROLE, target=role)
        for role, value in zip(ROLES, values, strict=False)
    ]
    rewards += [] if outcome is None else [Reward(value=outcome)]
    known = {"purpose": Purpose.EVAL, "attempt": "a", "rewards": rewards}
    return factories.rollout(**known | changed)


def run_of(folder: Path, **more: Any) -> RunConfig:
    return resolve({"output": str(folder / "run"), **more}, source="test")


def checkpoint(folder: Path, name: str, run: str = "run", policy: str = "") -> Path:
    path = folder / run / "checkpoints" / name
    (path / policy).mkdir(parents=True)
    (path / "state.json").write_text("{}")
    (path / policy / "config.json").write_text("{}")
    return path
