"""Commands about coding harnesses that run as agents."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

import click
import msgspec


@click.group()
def harness() -> None:
    """Coding harnesses that run as agents by `agent.harness`."""


@harness.command("list")
def list_presets() -> None:
    """Print the presets there are, the versions they were tested with and how to install them."""
    from agentrl.runners.harnesses.preset import HARNESSES, load_preset

    for name in HARNESSES:
        preset = load_preset(name, Path())
        click.echo(f"{name:<9} {' to '.join(sorted(set(preset.tested or ()))):<9} {preset.install}")


@harness.command("check")
@click.argument("name")
@click.option("--program", default="", help="Where its program is; default: looked up in PATH.")
@click.option("--json", "plain", is_flag=True, help="JSON instead of lines.")
def check_harness(name: str, program: str, plain: bool) -> None:
    """Run the harness NAME, or your own preset, against a scripted model, and print what it calls,
    sends and needs. The exit status is 1 where it could not be trained."""
    from agentrl.runners.harnesses.check import check
    from agentrl.runners.harnesses.preset import load_preset

    report = asyncio.run(check(name, Path(), program=program))
    problems = list(report.problems())
    if plain:
        click.echo(msgspec.json.encode(report))
        sys.exit(bool(problems))
    preset = load_preset(name, Path())
    click.echo(f"{report.program} {report.version}, {report.seconds:g} s")
    click.echo(f"needs  variables {', '.join(sorted(preset.env)) or 'of every agent'}")
    for file in preset.files:
        click.echo(f"       file ~/{file}")
    for call in report.calls:
        kind = "stream" if call.stream else "whole"
        click.echo(
            f"calls  {call.seconds:6.2f} s  {call.role or '-':<9} {call.path}  {call.status}"
            f"  {call.size} bytes  {call.tools} tools  {kind}"
        )
    fields = sorted({field for call in report.calls for field in call.fields})
    click.echo(f"sends  {', '.join(fields)}")
    roles = ", ".join(f"{count} of {role}" for role, count in report.roles.items())
    click.echo(
        f"found  {report.exact} of {report.served} calls recorded exactly: {roles or 'none'}"
    )
    for problem in problems:
        click.echo(f"wrong  {problem}")
    sys.exit(bool(problems))
