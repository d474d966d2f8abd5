"""The command line: `agentrl COMMAND`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import click


def numbers(kind: type[int] | type[float]) -> Callable[..., Any]:
    """A click callback for an option with comma-separated numbers; no value: an empty list."""

    def read(_: click.Context, __: click.Parameter, value: str | None) -> list[Any]:
        try:
            return [kind(word) for word in value.split(",")] if value else []
        except ValueError:
            raise click.BadParameter(f"{value!r}: write comma-separated numbers") from None

    return read
