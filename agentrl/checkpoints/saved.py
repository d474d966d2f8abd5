"""The checkpoints of a run on disk."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from agentrl.config import RunConfig
from agentrl.errors import ConfigError

STEPS = re.compile(r"(\d+)(?:\.\d+)?$")  # a checkpoint's name: its steps and its writer's epoch


@dataclass(frozen=True, slots=True)
class SavedCheckpoint:
    """A checkpoint directory from `agentrl train`."""

    path: Path
    steps: int


def checkpoint_at(path: Path) -> SavedCheckpoint:
    """The checkpoint at a path. Raises ConfigError if there is none."""
    named = STEPS.match(path.name)
    if not path.is_dir():
        raise ConfigError(f"{path}: no such checkpoint directory")
    if named is None or not (path / "state.json").is_file():
        raise ConfigError(f"{path} is not a checkpoint of a run; give <output>/checkpoints/...")
    return SavedCheckpoint(path.resolve(), int(named[1]))


def checkpoints_of(config: RunConfig) -> list[SavedCheckpoint]:
    """The checkpoints of a run on disk, oldest first."""
    folder = Path(config.output, "checkpoints")
    found = [path for path in folder.glob("*") if STEPS.match(path.name) and path.is_dir()]
    return sorted(map(checkpoint_at, found), key=lambda one: (one.steps, one.path.name))
