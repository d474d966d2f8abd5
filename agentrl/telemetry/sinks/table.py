"""The table [metrics] of the run file."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Any

import msgspec

from agentrl.base.loading import is_installed
from agentrl.config.base import Section
from agentrl.errors import install_command, nearest
from agentrl.plugins import BUILT_IN, plugin_points


class MetricsConfig(Section, frozen=True):
    """Sinks of metrics besides the store. Each is an extra: `pip install '.[wandb]'` in a clone."""

    # Sinks besides the store: tensorboard, wandb, mlflow, trackio, or your own as "file.py:name"
    sinks: list[str] = []
    options: dict[str, Any] = {}  # Arguments of your own sinks, with any keys.
    # Project, or in MLflow the experiment.
    project: Annotated[str, msgspec.Meta(min_length=1)] = "agentrl"

    def problems(self, config: Any) -> Iterator[str]:
        known = plugin_points("sinks").names
        for name in self.sinks:
            if ":" not in name and name not in known:
                cure = f"{nearest(name, known)}, or your own as file.py:name"
                yield f"metrics.sinks: {name!r}; {cure}"
            if self.sinks.count(name) > 1:
                yield f"metrics.sinks names {name!r} twice"
        for name in self.sinks:
            if name in BUILT_IN["sinks"] and not is_installed(name):
                yield f"metrics.sinks: {name!r} is not installed: {install_command(name)}"


def metrics_of(config: Any) -> MetricsConfig:
    settings: MetricsConfig = config.metrics
    return settings
