"""`agentrl env`: look at environments, play one by hand, check one, and install one."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click
import msgspec

from agentrl.errors import AgentRLError, ConfigError


@click.group()
def env() -> None:
    """Environments that people already have."""


def _named(context: click.Context, option: click.Parameter, given: tuple[str, ...]) -> Any:
    """The environment of PLUGIN:WHAT with KEY=VALUE options, or of a run file."""
    from agentrl.config import load
    from agentrl.config.derived import Named
    from agentrl.config.run_file import apply_override
    from agentrl.environments.settings import named_in

    name, *overrides = given
    if name.endswith(".toml"):
        named = named_in(load(Path(name), overrides))
        if named is None:
            raise ConfigError(f'{name} has no environment: write environment = "PLUGIN:WHAT"')
        return named
    options: dict[str, Any] = {}
    for override in overrides:
        apply_override(options, override)
    return Named.read(name, options, Path.cwd())


named = click.argument(
    "named", nargs=-1, required=True, callback=_named, metavar="PLUGIN:WHAT [KEY=VALUE]..."
)


@env.command("list")
def list_plugins() -> None:
    """Print the plug-ins, what they are for, and what they install."""
    from agentrl.config.derived import Named
    from agentrl.environments.reference import load_class
    from agentrl.plugins import plugin_points

    for name in sorted(plugin_points("environments").names):
        one = Named.read(f"{name}:", {})
        try:
            class_ = load_class(one)
        except AgentRLError as error:
            click.echo(f"{name:<15} cannot be imported: {error}")
            continue
        text = sys.modules[class_.__module__].__doc__ or class_.__doc__ or ""
        first = " ".join(text.split()).partition(". ")[0].rstrip(".")
        click.echo(f"{name:<15} {first}")
        needs = ", ".join(class_.requires) or "nothing"
        click.echo(f"{'':<15} needs {needs}" + f"; installed in {one.folder}" * bool(one.python))


@env.command("show")
@named
@click.option("--split", type=click.Choice(["train", "heldout"]), default="train")
@click.option("--task", "id", help="Id of the task to play; default: the first.")
@click.option("--play/--no-play", default=None, help="Default: play if this is a terminal.")
def show(named: Any, split: str, id: str | None, play: bool | None) -> None:
    """Print tasks of an environment, and play one of them by hand: you are the model.

    An answer is a line of text, or a JSON object as the assistant's message; `/call NAME {...}`
    calls a tool."""
    from agentrl.environments.commands.show import play_by_hand, print_tasks

    task = print_tasks(named, split, id)
    if sys.stdin.isatty() if play is None else play:
        asyncio.run(play_by_hand(named, task))


@env.command("check")
@named
@click.option("--tasks", "count", type=click.IntRange(1), default=3, show_default=True)
@click.option("--timeout", type=click.FloatRange(0, min_open=True), default=120.0)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def check(named: Any, count: int, timeout: float, as_json: bool) -> None:
    """Check an environment before a run relies on it.

    Its ids and tasks, a rollout with a model that knows nothing, and the score of its own ground
    truth on --tasks tasks, if it has any. Each line is ok, warn or fail. Exit code: 1 if a check
    failed."""
    from agentrl.environments.commands.check import examine

    say: Callable[[str], None] = click.echo if not as_json else lambda _: None
    report = asyncio.run(examine(named, count, timeout, say))
    if as_json:
        click.echo(msgspec.json.encode(report))
    sys.exit(not report.ok)


@env.command("install")
@click.argument("plugin")
@click.option("--into", type=click.Path(path_type=Path), help="Folder; default: .venv-PLUGIN here.")
@click.option("--python", help="Interpreter that makes it; default: the one of this command.")
def install(plugin: str, into: Path | None, python: str | None) -> None:
    """Make an interpreter for PLUGIN, with all that it needs and agentrl without extras.

    A run file in the same folder uses it by itself. Repeat the command to repair one."""
    from agentrl.environments.commands.install import install as made

    folder = made(plugin, into, python or sys.executable, click.echo)
    click.echo(f"Done. Next: agentrl env check {plugin}:WHAT, which uses {folder}/bin/python")
