"""The metrics sinks that `metrics.sinks` may name, and which of them are not installed."""

from __future__ import annotations

from collections.abc import Iterable
from importlib.metadata import entry_points
from importlib.util import find_spec

SINKS = ("mlflow", "tensorboard", "trackio", "wandb")
"""Names: of the sink, of its module here, of the package it needs and of the extra that has it."""


def known_sinks() -> list[str]:
    """The library's own and those of installed packages."""
    return [*SINKS, *entry_points(group="agentrl.sinks").names]


def missing(names: Iterable[str]) -> list[str]:
    """Those of the sinks whose package is not installed."""
    # A folder that a package of that name made in the working directory is found too, without a
    # file of its own.
    specs = {name: find_spec(name) for name in names}
    return [name for name, spec in specs.items() if spec is None or spec.origin is None]
