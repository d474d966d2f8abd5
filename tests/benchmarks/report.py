"""What the commands of benchmarks have in common: `--json`, and figures by name as one JSON object
or as a table."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Mapping
from typing import Any


def arguments(doc: str | None) -> argparse.ArgumentParser:
    """A parser that takes `--json`, described by the first line of a module's docstring."""
    parser = argparse.ArgumentParser(description=(doc or "").partition("\n")[0])
    parser.add_argument("--json", action="store_true", help="print one JSON object only")
    return parser


def report(
    figures: Mapping[str, Any], *, as_json: bool, targets: Mapping[str, float] | None = None
) -> None:
    """Prints the figures, each beside its target if it has one."""
    if as_json:
        print(json.dumps(figures))
        return
    rows = list(lines(figures))
    width = max((len(name) for name, _ in rows), default=0)
    for name, value in rows:
        target = f"  (target {targets[name]:.4g})" if targets and name in targets else ""
        print(f"{name:<{width}} {shown(value)}{target}")


def lines(figures: Mapping[str, Any], within: str = "") -> Iterator[tuple[str, Any]]:
    """Name and value; the names in a mapping come after its own."""
    for name, value in figures.items():
        if isinstance(value, Mapping):
            yield from lines(value, f"{within}{name} ")
        else:
            yield f"{within}{name}", value


def shown(value: Any) -> str:
    if isinstance(value, list | tuple):
        return " ".join(map(shown, value))
    return f"{value:>10.4g}" if isinstance(value, float) else f"{value!s:>10}"
