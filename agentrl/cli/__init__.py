"""The command line: `agentrl COMMAND`."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from pkgutil import resolve_name
from typing import Any

import click
import msgspec
from rich.console import Console, RenderableType

from agentrl.base.processes import LOG_LEVEL
from agentrl.config import RunConfig
from agentrl.telemetry.console import console_level

# The commands that are imported when they are used, with the names of their groups before theirs.
# Those of `agentrl.cli.main` and `agentrl.cli.store` are not among them.
COMMANDS = {
    "ablate": "agentrl.teams.command:ablate",
    "algorithm demonstrate": "agentrl.algorithms.demonstrations.command:play_demonstrations",
    "algorithm play": "agentrl.evaluation.plans.command:play_lineups",
    "algorithm prompts": "agentrl.algorithms.prompts.command:search_process",
    "algorithms": "agentrl.lab.command:algorithms",
    "bench": "agentrl.lab.command:bench",
    "compare": "agentrl.view.command:compare",
    "config": "agentrl.run_files.command:config",
    "crossplay": "agentrl.algorithms.selfplay.command:crossplay",
    "data": "agentrl.algorithms.preferences.command:data",
    "demonstrate": "agentrl.algorithms.demonstrations.command:demonstrate",
    "doctor": "agentrl.doctor.command:doctor",
    "env": "agentrl.environments.commands.env:env",
    "eval": "agentrl.evaluation.checkpoint.command:evaluate",
    "explain": "agentrl.algorithms.explain.command:explain",
    "export model": "agentrl.model_files.export:model",
    "export otlp": "agentrl.telemetry.otlp.command:otlp",
    "gateway": "agentrl.runners.sessions.command:gateway",
    "harness": "agentrl.runners.harnesses.command:harness",
    "init": "agentrl.run_files.command:init",
    "live": "agentrl.live.command:live",
    "live export": "agentrl.live.people_command:export",
    "live forget": "agentrl.live.people_command:forget",
    "live offer": "agentrl.live.lanes.command:offer",
    "live promote": "agentrl.live.lanes.command:promote",
    "live rollback": "agentrl.live.lanes.command:rollback",
    "live status": "agentrl.live.lanes.command:status",
    "live users": "agentrl.live.people_command:users",
    "mcp": "agentrl.coding_agents.command:mcp",
    "metrics": "agentrl.metrics.command:metrics",
    "model": "agentrl.model_files.command:model",
    "plan": "agentrl.lab.command:plan",
    "prompts": "agentrl.algorithms.prompts.command:prompts",
    "rm": "agentrl.algorithms.reward_models.command:rm",
    "serve": "agentrl.serve.command:serve",
    "show": "agentrl.traces.command:show",
    "sink": "agentrl.telemetry.sinks.command:sink",
    "skill": "agentrl.coding_agents.command:skill",
    "store backup": "agentrl.store.maintenance.command:backup",
    "store prune": "agentrl.store.maintenance.command:prune",
    "store serve": "agentrl.store.http.command:serve",
    "store stats": "agentrl.store.maintenance.command:stats",
    "store vacuum": "agentrl.store.maintenance.command:vacuum",
    "view": "agentrl.view.command:view",
    "why": "agentrl.algorithms.why.command:why",
}
WHOLE = 1000  # characters of a sentence


def numbers(kind: type[int] | type[float]) -> Callable[..., Any]:
    """A click callback for an option with comma-separated numbers; no value: an empty list."""

    def read(_: click.Context, __: click.Parameter, value: str | None) -> list[Any]:
        try:
            return [kind(word) for word in value.split(",")] if value else []
        except ValueError:
            raise click.BadParameter(f"{value!r}: write comma-separated numbers") from None

    return read


class ResumedCommand(click.Command):
    """A command that goes on where it was stopped. continues: where, for a message."""

    def __init__(self, *args: Any, continues: str, **named: Any) -> None:
        super().__init__(*args, **named)
        self.continues = continues


def how_to_continue(group: click.Group, arguments: list[str], place: str = "") -> str:
    """What the same command does after it was stopped; empty if it starts over. place: where it
    continues, if that is known."""
    command = group.get_command(click.Context(group), next(iter(arguments), ""))
    where = (place or command.continues) if isinstance(command, ResumedCommand) else ""
    again = [one for one in arguments if one.partition("=")[0] in ("--fresh", "--from")]
    without = f" without {again[0].partition('=')[0]}" if again else ""
    return f" The same command{without} continues {where}." if where else ""


class CommandGroup(click.Group):
    """A group that also has the commands of `COMMANDS` whose names begin with `path`."""

    def __init__(self, *args: Any, path: str = "", **named: Any) -> None:
        super().__init__(*args, **named)
        self.path = path

    def list_commands(self, ctx: click.Context) -> list[str]:
        named = (name.rpartition(" ") for name in COMMANDS)
        return sorted({*self.commands, *(name for path, _, name in named if path == self.path)})

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """With whole sentences, which click cuts off at the end of a line."""
        found = ((name, self.get_command(ctx, name)) for name in self.list_commands(ctx))
        rows = [
            (name, one.get_short_help_str(WHOLE)) for name, one in found if one and not one.hidden
        ]
        with formatter.section("Commands"):
            formatter.write_dl(rows)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if own := super().get_command(ctx, cmd_name):
            return own
        place = COMMANDS.get(f"{self.path} {cmd_name}".strip())
        command: click.Command | None = resolve_name(place) if place else None
        return command


def _read(context: click.Context, option: click.Parameter, file: Path) -> RunConfig:
    return msgspec.json.decode(file.read_bytes(), type=RunConfig)


config_file = click.argument("config", type=click.Path(path_type=Path), callback=_read)
"""The settings of a run, which its front has written for its processes."""


def print_result(result: RenderableType) -> None:
    """Print text unchanged, and a table to fit the terminal."""
    if isinstance(result, str):
        click.echo(result, nl=result[-1:] not in ("", "\n"))
    else:
        Console().print(result)


def _log_level(context: click.Context, option: click.Parameter, value: str | None) -> None:
    if value is not None:
        os.environ[LOG_LEVEL] = value  # the processes of a run inherit it


log_level = click.option(
    "--log-level",
    type=click.Choice(["DEBUG", "INFO", "WARNING", "ERROR"], case_sensitive=False),
    callback=_log_level,
    expose_value=False,
    help="Level of the log files of a run's processes; default: INFO.",
)
quiet = click.option("--quiet", "-q", is_flag=True, help="Show only warnings and the result.")
verbose = click.option("--verbose", "-v", is_flag=True, help="Also show the processes' logs.")


def level_of(*, quiet: bool, verbose: bool) -> int:
    if quiet and verbose:
        raise click.UsageError("--quiet or --verbose, not both")
    return console_level(quiet=quiet, verbose=verbose)
