"""The tasks of a run."""

from __future__ import annotations

from pathlib import Path

from agentrl.base.loading import load_tasks
from agentrl.config.schema import RunConfig
from agentrl.types import Json


def tasks_of(config: RunConfig, split: str) -> list[dict[str, Json]]:
    """The tasks of a run, none if its settings name none. split: train or heldout. Raises
    ConfigError."""
    path, columns = getattr(config.tasks, split), config.tasks.columns
    key = f"tasks.{split}"
    return load_tasks(path, Path(config.root), key=key, columns=columns) if path else []
