"""`agentrl train --dry-run`: the settings of a run, and what it needs."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

import click

from agentrl.config import RunConfig, to_toml
from agentrl.config.policies import trained_policies, view


def show_settings(config: RunConfig) -> None:
    """Print a run file with every setting and, as comments, estimates of memory and time. Raises
    ConfigError for settings that contradict each other."""
    lines: list[str] = []
    if find_spec("torch") and find_spec("transformers"):  # the extra `train`
        from agentrl.algorithms.train.build import group_requirements, load_algorithms
        from agentrl.algorithms.train.hooks import hooks_of

        parts = hooks_of(config)
        group_requirements(config, load_algorithms(config, parts), parts)
        if config.learner.kind == "torch":
            lines = _estimates(config)
    said = "".join(f"# {line}\n" for line in lines)
    click.echo(said + to_toml(config) + config.learner.derived(config), nl=False)


def _estimates(config: RunConfig) -> list[str]:
    from agentrl.algorithms.model.estimate import describe

    found: list[str] = []
    views = (view(config, name) for name in trained_policies(config))
    for source, own in {each.model_path(): each for each in views}.items():
        if own.policy.build and not Path(source or "?").is_dir():
            return ["memory and time are estimated at the start of the run, after policy.build"]
        try:
            found += describe(own, source) if source else []
        except (OSError, ValueError):  # it is on the hub
            found.append(f"memory and time of {source} are unknown; agentrl doctor asks the hub")
    return found
