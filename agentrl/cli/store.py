"""`agentrl store`: the group of the commands about a store, and what they share."""

from __future__ import annotations

import re

import click

from agentrl.cli import CommandGroup

UNITS = {"s": 1, "m": 60, "h": 3600, "d": 86_400, "w": 604_800}


@click.group(cls=CommandGroup, path="store")
def store() -> None:
    """Serve, inspect and maintain a store."""


def age(_: click.Context, __: click.Parameter, value: str | None) -> float | None:
    """A click callback: seconds from a number with a unit, such as 90s, 30m, 12h, 7d or 2w."""
    if value is None:
        return None
    parts = re.fullmatch(r"(\d+(?:\.\d+)?)([smhdw])", value)
    if parts is None:
        raise click.BadParameter(f"{value!r} is no age: write it like 90s, 30m, 12h, 7d or 2w.")
    return float(parts[1]) * UNITS[parts[2]]
