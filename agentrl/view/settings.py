"""All settings of a run as tables, those that were changed first in each."""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import cache
from typing import Any, NamedTuple

import msgspec

from agentrl.config import from_store
from agentrl.config.keys import flatten
from agentrl.errors import AgentRLError
from agentrl.types import Json

# Values that may be secrets: the variables of the agent, and whatever is called so.
SECRET = re.compile(r"agent\.env\.|(^|[._-])(api[_-]?key|secret|password|token)$", re.I)
TOP = "run"  # the name of the table of settings without one


class Setting(NamedTuple):
    name: str
    value: Json
    changed: bool  # whether it is not the default


def tables(config: Mapping[str, Any]) -> dict[str, list[Setting]]:
    """Table -> its settings."""
    found: dict[str, list[Setting]] = {}
    defaults = _defaults()
    for key, value in flatten(config).items():
        table, dot, name = key.partition(".")
        shown = "set" if value and SECRET.search(key) else value
        changed = bool(defaults) and value != defaults.get(key) and value not in ("", [], None)
        row = Setting(name if dot else table, shown, changed)
        found.setdefault(table if dot else TOP, []).append(row)
    return {name: sorted(rows, key=lambda row: not row.changed) for name, rows in found.items()}


@cache
def _defaults() -> Mapping[str, Json]:
    try:
        return flatten(msgspec.to_builtins(from_store({"name": "run"})))
    except AgentRLError:
        return {}
