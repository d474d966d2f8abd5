"""`agentrl sink start`: the process that writes a run's metrics to its sinks."""

from __future__ import annotations

import click

from agentrl.cli import config_file
from agentrl.config import RunConfig


@click.group(hidden=True)
def sink() -> None:
    """Metrics sinks; `agentrl train` starts them."""


@sink.command("start")
@config_file
def start_sinks(config: RunConfig) -> None:
    """Write metrics until standard input ends."""
    from agentrl.telemetry.sinks.process import main as write_metrics

    write_metrics(config)
