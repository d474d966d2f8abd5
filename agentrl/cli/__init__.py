"""The command line: `agentrl COMMAND`."""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from inspect import cleandoc
from pathlib import Path
from pkgutil import resolve_name
from typing import TYPE_CHECKING, Any

import click
import msgspec

from agentrl.core.config import RunConfig
from agentrl.core.processes import LOG_LEVEL

if TYPE_CHECKING:
    from rich.console import RenderableType

# Commands that are imported at their first use, by full name ("group command"). Commands of
# `agentrl.cli.main` and `agentrl.cli.store` are not listed.
COMMANDS = {
    "algorithms": "agentrl.cli.evaluate:algorithms",
    "audit": "agentrl.cli.audit:audit",
    "compare": "agentrl.cli.inspect:compare",
    "data": "agentrl.cli.data:data",
    "demonstrate": "agentrl.cli.data:demonstrate",
    "doctor": "agentrl.cli.inspect:doctor",
    "env": "agentrl.cli.environments:env",
    "eval": "agentrl.cli.evaluate:evaluate",
    "explain": "agentrl.cli.inspect:explain",
    "export model": "agentrl.models.export:model",
    "export otlp": "agentrl.cli.inspect:otlp",
    "export traces": "agentrl.cli.traces:export_command",
    "gateway": "agentrl.cli.live:gateway",
    "harness": "agentrl.cli.environments:harness",
    "init": "agentrl.cli.init:init",
    "live": "agentrl.cli.live:live",
    "live offer": "agentrl.cli.live:offer",
    "live promote": "agentrl.cli.live:promote",
    "live rollback": "agentrl.cli.live:rollback",
    "live status": "agentrl.cli.live:status",
    "live users": "agentrl.cli.live:users",
    "mcp": "agentrl.cli.mcp:mcp",
    "metrics": "agentrl.cli.inspect:metrics",
    "model": "agentrl.cli.models:model",
    "prompts": "agentrl.cli.models:prompts",
    "rescore": "agentrl.cli.audit:rescore",
    "reward-model": "agentrl.cli.models:reward_model",
    "serve": "agentrl.cli.models:serve",
    "show": "agentrl.cli.inspect:show",
    "skill": "agentrl.cli.mcp:skill",
    "store backup": "agentrl.cli.store:backup",
    "store prune": "agentrl.cli.store:prune",
    "store serve": "agentrl.cli.store:serve",
    "store stats": "agentrl.cli.store:stats",
    "traces": "agentrl.cli.traces:traces",
    "view": "agentrl.cli.inspect:view",
    "why": "agentrl.cli.inspect:why",
}
MAX_HELP_CHARS = 1000  # characters of a command's sentence


def numbers(kind: type[int] | type[float]) -> Callable[..., Any]:
    """A click callback for an option with comma-separated numbers; no value: an empty list."""

    def read(_: click.Context, __: click.Parameter, value: str | None) -> list[Any]:
        try:
            return [kind(word) for word in value.split(",")] if value else []
        except ValueError:
            raise click.BadParameter(f"{value!r}: write comma-separated numbers") from None

    return read


class ResumedCommand(click.Command):
    """A command that resumes where it stopped. continues: where, for a message; resumes: whether
    it does with the options that were given."""

    def __init__(
        self,
        *args: Any,
        continues: str,
        resumes: Callable[[set[str]], bool] = lambda options: True,
        **kwargs: Any,
    ) -> None:
        super().__init__(*args, **kwargs)
        self.continues, self.resumes = continues, resumes

    def continues_with(self, options: set[str]) -> str:
        return self.continues if self.resumes(options) else ""


def how_to_continue(group: click.Group, arguments: list[str], place: str = "") -> str:
    """A sentence: what the stopped command does if it is run again; empty if it starts over. place:
    where it continues, if known."""
    command = group.get_command(click.Context(group), next(iter(arguments), ""))
    options = {word.partition("=")[0] for word in arguments}
    resumed = command.continues_with(options) if isinstance(command, ResumedCommand) else ""
    where = resumed and (place or resumed)
    restarting = [word for word in arguments if word.partition("=")[0] in ("--fresh", "--from")]
    without = f" without {restarting[0].partition('=')[0]}" if restarting else ""
    return f" The same command{without} continues {where}." if where else ""


class CommandGroup(click.Group):
    """A group that also has the commands of `COMMANDS` whose names begin with `path`."""

    def __init__(self, *args: Any, path: str = "", **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.path = path

    def list_commands(self, ctx: click.Context) -> list[str]:
        named = (name.rpartition(" ") for name in COMMANDS)
        return sorted({*self.commands, *(name for path, _, name in named if path == self.path)})

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """With whole sentences, which click cuts off at the end of a line."""
        described = ((name, self._described(ctx, name)) for name in self.list_commands(ctx))
        rows = [
            (name, command.get_short_help_str(MAX_HELP_CHARS))
            for name, command in described
            if command and not command.hidden
        ]
        with formatter.section("Commands"):
            formatter.write_dl(rows)

    def _described(self, ctx: click.Context, name: str) -> click.Command | None:
        """The command, or a stub with its docstring, so that help does not import the command's
        module."""
        place = "" if name in self.commands else COMMANDS.get(f"{self.path} {name}".strip(), "")
        text = _docstring(*place.split(":")) if place else ""
        return click.Command(name, help=text) if text else self.get_command(ctx, name)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if command_here := super().get_command(ctx, cmd_name):
            return command_here
        place = COMMANDS.get(f"{self.path} {cmd_name}".strip())
        command: click.Command | None = resolve_name(place) if place else None
        return command


def _docstring(module: str, function: str) -> str:
    """The docstring of a module's function, from its source; empty if it cannot be read."""
    file = Path(__file__).parents[1].joinpath(*module.split(".")[1:]).with_suffix(".py")
    if not file.is_file():
        return ""
    _, _, source = file.read_text(encoding="utf-8").partition(f"\ndef {function}(")
    match = re.match(r'(?s).*?:(?:  #[^\n]*)?\n    """(.*?)"""', source)
    return cleandoc(match[1]) if match else ""


def _read(context: click.Context, option: click.Parameter, file: Path) -> RunConfig:
    return msgspec.json.decode(file.read_bytes(), type=RunConfig)


config_file = click.argument("config", type=click.Path(path_type=Path), callback=_read)
"""The settings of a run, which the launcher has written for its processes."""


def print_result(result: RenderableType) -> None:
    """Print text unchanged, and a table to fit the terminal."""
    if isinstance(result, str):
        click.echo(result, nl=result[-1:] not in ("", "\n"))
    else:
        from rich.console import Console

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
    from agentrl.telemetry.console import console_level

    return console_level(quiet=quiet, verbose=verbose)
