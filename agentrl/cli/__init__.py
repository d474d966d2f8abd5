"""The command line: `agentrl COMMAND`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import click

RESUMED = {
    "train": "after the last committed step",
    "prompts": "the search",
    "crossplay": "with the games that are left",
    "ablate": "with the games that are left",
}  # commands that go on where they were stopped


def numbers(kind: type[int] | type[float]) -> Callable[..., Any]:
    """A click callback for an option with comma-separated numbers; no value: an empty list."""

    def read(_: click.Context, __: click.Parameter, value: str | None) -> list[Any]:
        try:
            return [kind(word) for word in value.split(",")] if value else []
        except ValueError:
            raise click.BadParameter(f"{value!r}: write comma-separated numbers") from None

    return read


def how_to_continue(arguments: list[str]) -> str:
    """What the same command does after it was stopped; empty if it starts over."""
    where = RESUMED.get(next(iter(arguments), ""))
    again = [one for one in arguments if one.partition("=")[0] in ("--fresh", "--from")]
    without = f" without {again[0].partition('=')[0]}" if again else ""
    return f" The same command{without} continues {where}." if where else ""
