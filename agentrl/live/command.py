"""`agentrl live`: serve, learn and promote; `agentrl live COMMAND`: look at it and steer it."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import click

from agentrl.base.processes import die_with_parent
from agentrl.cli import CommandGroup, config_file, level_of, log_level, quiet, verbose
from agentrl.config import RunConfig, load
from agentrl.errors import ConfigError


class RunsByDefault(CommandGroup):
    """A group whose command `start` is meant if the first argument is none of its commands."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        return super().parse_args(ctx, self._named(ctx, args))

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        return super().resolve_command(ctx, self._named(ctx, args))

    def _named(self, ctx: click.Context, args: list[str]) -> list[str]:
        known = not args or args[0] in (*self.list_commands(ctx), *ctx.help_option_names)
        return args if known else ["start", *args]


@click.group(cls=RunsByDefault, path="live")
def live() -> None:
    """Serve an agent's model and learn from its sessions: `agentrl live RUN_FILE`."""


@live.command()
@click.argument("run_file", type=click.Path(path_type=Path))
@click.argument("overrides", nargs=-1)
@click.option(
    "--only", type=click.Choice(["gateway", "training"]), help="Run one half, on its own machine."
)
@click.option("--take-over", is_flag=True, help="Stop a live process of this run, and go on here.")
@quiet
@verbose
@log_level
def start(
    run_file: Path,
    overrides: tuple[str, ...],
    only: Literal["gateway", "training"] | None,
    take_over: bool,
    quiet: bool,
    verbose: bool,
) -> None:
    """Serve the policy of RUN_FILE, train it on its sessions and promote what is better, until
    Ctrl-C. The same command goes on."""
    from agentrl.live.supervisor import run_live

    config = load(run_file, [*overrides, "live.running=true"])
    refuse_groups(config.algorithm.preset)
    level = level_of(quiet=quiet, verbose=verbose)
    run_live(config, only, take_over=take_over, level=level)


def refuse_groups(preset: str) -> None:
    """Raise ConfigError for the default preset, before anything is served."""
    if preset.partition("+")[0] == "auto":
        raise ConfigError(
            f"algorithm.preset = {preset!r} compares rollouts of a task, and a session has no "
            "second one; set it to 'reinforce+ema+tis', which learns from outcomes, or to another "
            "that needs no groups and corrects for older versions"
        )


@live.command(hidden=True)
@config_file
def gateway(config: RunConfig) -> None:
    """The process that answers the agent's calls. It outlives its supervisor for a while."""
    from agentrl.live.serving import main

    main(config)


@live.command(hidden=True)
@config_file
def score(config: RunConfig) -> None:
    """The process that plays the held-out tasks with one version."""
    die_with_parent()
    from agentrl.live.lanes.heldout import play

    play(config)


@live.command(hidden=True)
@config_file
def watch(config: RunConfig) -> None:
    """The process that labels sessions and decides about versions."""
    die_with_parent()
    from agentrl.live.watch import main

    main(config)
