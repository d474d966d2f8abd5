"""`agentrl train --dry-run`: the settings of a run, and what it needs."""

from __future__ import annotations

from importlib.util import find_spec

import click

from agentrl.base.parts import installed_plugins
from agentrl.config import RunConfig, to_toml


def show_settings(config: RunConfig) -> None:
    """Print a run file with every setting and, as comments, what parts foresee of the run. Raises
    ConfigError for settings that contradict each other."""
    lines: list[str] = []
    if find_spec("torch") and find_spec("transformers"):  # the extra `train`
        from agentrl.algorithms.train.build import group_requirements, load_algorithms

        group_requirements(config, load_algorithms(config))
        for point in installed_plugins("forecasts"):
            lines += point.load()(config)
    said = "".join(f"# {line}\n" for line in lines)
    click.echo(said + to_toml(config) + config.learner.derived(config), nl=False)
