"""The table [data] of the run file."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from agentrl.config.base import Natural, Section, played_tables

PLAYING = (
    "agent", "workspace", "tasks", "verifier", "policies", "team", "sampling", "runner",
    "upstreams", "roles", "role_rules",
)  # fmt: skip
SAMPLING = (
    "group_size", "min_group", "missing_token_ids", "max_staleness", "dynamic_sampling",
    "max_rounds", "group_quorum", "group_deadline", "max_kl",
)  # fmt: skip


class DataConfig(Section, frozen=True):
    """Train on a data set of the store (see `agentrl data`) instead of agent, tasks and verifier. A
    step trains on `algorithm.groups` items."""

    name: str = ""  # Name of the data set; empty: train on rollouts.
    version: Natural = 0  # Version of the data set; 0: the newest at the start of the run.
    split: str = "train"  # split for training
    heldout: str = "test"  # split on which [eval] measures the loss

    @property
    def replaces_rollouts(self) -> bool:
        return bool(self.name)

    def problems(self, config: Any) -> Iterator[str]:
        """A run on a data set runs no agent and serves no policy."""
        if not self.name:
            if self != DataConfig():
                yield "[data] has no effect without `name`, a data set of the store"
            return
        why = "has no effect in a run on [data], which plays no rollouts"
        for table in _changed(config, PLAYING):
            yield f"[{table}] {why}; remove one"
        for key in _changed(config.algorithm, SAMPLING):
            yield f"algorithm.{key} {why}"


def _changed(section: Section, names: tuple[str, ...]) -> Iterator[str]:
    """Which of these settings, or of tables of other parts about rollouts, are no defaults."""
    plain = type(section)()
    for name in dict.fromkeys(
        (*names, *played_tables(section))
    ):  # a table of a part that is not installed: None
        if getattr(section, name, None) != getattr(plain, name, None):
            yield name


def data_of(config: Any) -> DataConfig:
    settings: DataConfig = config.data
    return settings
