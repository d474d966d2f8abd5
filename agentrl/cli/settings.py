"""`agentrl train --dry-run`: the settings of a run, and what it needs."""

from __future__ import annotations

from importlib.util import find_spec

import click
from msgspec.structs import replace

from agentrl.config import RunConfig, to_toml
from agentrl.config.infrastructure import VerlLearnerConfig
from agentrl.store.urls import split_secret


def show_settings(config: RunConfig) -> None:
    """Print a run file with every setting and, as comments, a forecast of the run. Raises
    ConfigError for settings that contradict each other."""
    lines: list[str] = []
    if find_spec("torch") and find_spec("transformers"):  # the extra `train`
        from agentrl.algorithms.preflight.training import forecast
        from agentrl.algorithms.train.build import group_requirements, load_algorithms

        group_requirements(config, load_algorithms(config))
        lines += forecast(config)
    said = "".join(f"# {line}\n" for line in lines)
    said += to_toml(replace(config, store=split_secret(config.store)[0]))
    if isinstance(config.learner, VerlLearnerConfig):
        from agentrl.algorithms.learners.verl.settings import describe_settings

        said += describe_settings(config)
    click.echo(said, nl=False)
