"""`agentrl env` and `agentrl harness`: environments, and coding harnesses as agents.

Environments are shown, played by hand and installed, and checked by `agentrl doctor`.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

import click
import msgspec

from agentrl.core.errors import AgentRLError, ConfigError


@click.group()
def env() -> None:
    """Environments that people already have."""


def named_environment(words: tuple[str, ...]) -> Any:
    """The environment of PLUGIN:WHAT with KEY=VALUE options, or of a run file."""
    from agentrl.core.config import load
    from agentrl.core.config.derived import EnvironmentName
    from agentrl.core.config.run_file import apply_override
    from agentrl.environments.hosted import named_in

    name, *overrides = words
    if name.endswith(".toml"):
        environment = named_in(load(Path(name), overrides))
        if environment is None:
            raise ConfigError(f'{name} has no environment: write environment = "PLUGIN:WHAT"')
        return environment
    options: dict[str, Any] = {}
    for override in overrides:
        apply_override(options, override)
    return EnvironmentName.read(name, options, Path.cwd())


def _print_plugins() -> None:
    from agentrl.core.config.derived import EnvironmentName
    from agentrl.core.plugins import plugin_points
    from agentrl.environments.hosted import load_class

    for name in sorted(plugin_points("environments").names):
        named = EnvironmentName.read(f"{name}:", {})
        try:
            class_ = load_class(named)
        except AgentRLError as error:
            click.echo(f"{name:<15} cannot be imported: {error}")
            continue
        text = class_.__doc__ or sys.modules[class_.__module__].__doc__ or ""
        first = " ".join(text.split()).partition(". ")[0].rstrip(".")
        click.echo(f"{name:<15} {first}")
        needs = ", ".join(class_.requires) or "nothing"
        click.echo(
            f"{'':<15} needs {needs}" + f"; installed in {named.folder}" * bool(named.python)
        )


@env.command("show")
@click.argument("words", nargs=-1, metavar="[PLUGIN:WHAT [KEY=VALUE]...]")
@click.option("--task", "id", help="Id of the task to play; default: the first.")
@click.option("--play/--no-play", default=None, help="Default: play if this is a terminal.")
def show(words: tuple[str, ...], id: str | None, play: bool | None) -> None:
    """Print tasks of an environment, and play one of them by hand: you are the model. Without an
    environment: print the plug-ins, what they are for, and what they install.

    An answer is a line of text, or a JSON object as the assistant's message; `/call NAME {...}`
    calls a tool."""
    from agentrl.environments.packages import play_by_hand, print_tasks

    if not words:
        _print_plugins()
        return
    environment = named_environment(words)
    task = print_tasks(environment, id)
    if sys.stdin.isatty() if play is None else play:
        asyncio.run(play_by_hand(environment, task))


def check_environment(words: tuple[str, ...], count: int, *, as_json: bool) -> NoReturn:
    """Print what `agentrl doctor` finds in an environment; exit with 1 if a check failed."""
    from agentrl.environments.packages import examine

    environment = named_environment(words)
    say: Callable[[str], None] = click.echo if not as_json else lambda _: None
    report = asyncio.run(examine(environment, count, say))
    if as_json:
        click.echo(msgspec.json.encode(report))
    sys.exit(not report.ok)


@env.command("install")
@click.argument("plugin")
@click.option("--into", type=click.Path(path_type=Path), help="Folder; default: .venv-PLUGIN here.")
@click.option("--python", help="Interpreter that creates it; default: the one of this command.")
def install(plugin: str, into: Path | None, python: str | None) -> None:
    """Create a virtual environment for PLUGIN, with its requirements and agentrl without extras. A
    run file in the same folder uses it automatically. Run the command again to repair it."""
    from agentrl.environments.packages import install as install_plugin

    folder = install_plugin(plugin, into, python or sys.executable, click.echo)
    check = f"agentrl doctor --environment {plugin}:WHAT"
    click.echo(f"Done. Next: {check}, which uses {folder}/bin/python")


@click.command()
@click.argument("name", required=False)
def harness(name: str | None) -> None:
    """Check the coding harness NAME, or your own preset, of `agent.harness`: run it against a
    scripted model, and print its calls, the fields of its requests and its needs. The exit status
    is 1 if it could not be trained.

    Without NAME: print the presets, the versions they were tested with and how to install them."""
    if name is None:
        _list_presets()
    else:
        _check(name)


def _list_presets() -> None:
    from agentrl.runners.harness import HARNESSES, load_preset

    for name in HARNESSES:
        preset = load_preset(name, Path())
        click.echo(f"{name:<9} {' to '.join(sorted(set(preset.tested or ()))):<9} {preset.install}")


def _check(name: str) -> None:
    from agentrl.runners.harness import load_preset
    from agentrl.runners.harness_check import check

    report, preset = asyncio.run(check(name, Path())), load_preset(name, Path())
    click.echo(f"{report.program} {report.version}, {report.seconds:.2f} s")
    click.echo(f"needs  variables {', '.join(sorted(preset.env)) or 'of every agent'}")
    for file in preset.files:
        click.echo(f"       file ~/{file}")
    for call in report.seen:
        click.echo(
            f"calls  {call.at - report.begun:6.2f} s  {call.role or '-':<9} {call.path}"
            f"  {call.status}  {call.size} bytes  {call.tools} tools"
            f"{'  stream' * bool(call.body.get('stream'))}"
        )
    click.echo(f"sends  {', '.join(sorted({key for call in report.seen for key in call.body}))}")
    roles = ", ".join(f"{count} of {role}" for role, count in report.roles.items())
    click.echo(
        f"found  {report.exact} of {report.served} calls recorded exactly: {roles or 'none'}"
    )
    problems = list(report.problems())
    for problem in problems:
        click.echo(f"wrong  {problem}")
    sys.exit(bool(problems))
