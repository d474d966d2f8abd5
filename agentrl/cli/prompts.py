"""`agentrl prompts`: search for better texts, and list those of an agent."""

from __future__ import annotations

import asyncio
from pathlib import Path

import click

from agentrl.cli import ResumableCommand
from agentrl.config import load, store_of
from agentrl.telemetry.console import console_level


@click.command(cls=ResumableCommand, resumes="the search")
@click.argument("run_file")
@click.argument("overrides", nargs=-1)
@click.option("--fresh", is_flag=True, help="Delete the outputs of an earlier search.")
@click.option("--quiet", "-q", is_flag=True, help="Show only warnings and the result.")
@click.option("--store", help="With find: store URL; default: the store in runs/RUN.")
def prompts(
    run_file: str, overrides: tuple[str, ...], fresh: bool, quiet: bool, store: str | None
) -> None:
    """Search for better texts for the agent of RUN_FILE, or resume a stopped search.

    `agentrl prompts find RUN` prints the prompt texts in the calls of a run, by role."""
    from agentrl.evaluation import prompts as commands

    if run_file == "find" and not Path("find").is_file():
        if len(overrides) != 1:
            raise click.UsageError("give one run: agentrl prompts find RUN")
        url = store or store_of(overrides[0])
        click.echo(asyncio.run(commands.find(url, overrides[0])))
        return
    config = load(Path(run_file), overrides)
    commands.optimise(config, fresh=fresh, level=console_level(quiet=quiet, verbose=False))
