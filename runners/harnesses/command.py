"""Commands about coding harnesses that run as agents."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

import click


@click.group()
def harness() -> None:
    """Coding harnesses for `agent.harness`."""


@harness.command("list")
def list_presets() -> None:
    """Print the presets, the versions they were tested with and how to install them."""
    from agentrl.runners.harnesses.preset import HARNESSES, load_preset

    for name in HARNESSES:
        preset = load_preset(name, Path())
        click.echo(f"{name:<9} {' to '.join(sorted(set(preset.tested or ()))):<9} {preset.install}")


@harness.command("check")
@click.argument("name")
@click.option("--program", default="", help="Path of its program; default: searched in PATH.")
def check_harness(name: str, program: str) -> None:
    """Run the harness NAME, or your own preset, against a scripted model, and print its calls, the
    fields of its requests and its needs. The exit status is 1 if it could not be trained."""
    from agentrl.runners.harnesses.check import check
    from agentrl.runners.harnesses.preset import load_preset

    report, preset = asyncio.run(check(name, Path(), program=program)), load_preset(name, Path())
    click.echo(f"{report.program} {report.version}, {report.seconds:.2f} s")
    click.echo(f"needs  variables {', '.join(sorted(preset.env)) or 'of every agent'}")
    for file in preset.files:
        click.echo(f"       file ~/{file}")
    for one in report.seen:
        click.echo(
            f"calls  {one.at - report.begun:6.2f} s  {one.role or '-':<9} {one.path}  {one.status}"
            f"  {one.size} bytes  {one.tools} tools{'  stream' * bool(one.body.get('stream'))}"
        )
    click.echo(f"sends  {', '.join(sorted({key for one in report.seen for key in one.body}))}")
    roles = ", ".join(f"{count} of {role}" for role, count in report.roles.items())
    click.echo(
        f"found  {report.exact} of {report.served} calls recorded exactly: {roles or 'none'}"
    )
    problems = list(report.problems())
    for problem in problems:
        click.echo(f"wrong  {problem}")
    sys.exit(bool(problems))
