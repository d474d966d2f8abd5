"""Settings of a run from Python: tables as dicts, names with dots, objects in place of names."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from agentrl.errors import ConfigError

# A parameter of `Trainer` that is no table is the first setting of its table.
FIRST = {"agent": "path", "tasks": "train", "verifier": "path", "policy": "model"}
OBJECTS = (
    *(("agent", "path"), ("verifier", "path"), ("tasks", "train"), ("tasks", "heldout")),
    ("warmup", "data"),
)


class Given(NamedTuple):
    """tables: as in a run file, without the objects, which stand beside it; None: not an object."""

    tables: dict[str, Any]
    agent: Any = None
    verifier: Any = None
    train: Any = None
    heldout: Any = None
    demonstrations: Any = None


def given(parameters: Mapping[str, Any], heldout: Any, settings: Mapping[str, Any]) -> Given:
    """What a caller of `Trainer` has given. parameters: of the names in FIRST, each a table or the
    first setting of one. Raises ConfigError for a setting that is given twice."""
    tables: dict[str, Any] = {}
    for name, value in parameters.items():
        if isinstance(value, Mapping):
            _put(tables, [name], value, name)
        elif value is not None and not (isinstance(value, str) and not value):
            path = isinstance(value, Path)
            _put(tables, [name, FIRST[name]], str(value) if path else value, name)
    if not (isinstance(heldout, str) and not heldout):
        _put(tables, ["tasks", "heldout"], heldout, "heldout")
    for name, value in settings.items():
        _put(tables, name.split("."), value, name)
    return Given(tables, *(_object(tables, *place) for place in OBJECTS))


def _put(tables: dict[str, Any], path: list[str], value: Any, name: str) -> None:
    """Set the setting at `path`. Tables are merged; nothing is replaced."""
    table = tables
    for part in path[:-1]:
        table = table.setdefault(part, {})
        if not isinstance(table, dict):
            raise ConfigError(f"Trainer: {name}: {part!r} is a value already, not a table")
    last = path[-1]
    if not isinstance(value, Mapping):
        if last in table:
            raise ConfigError(f"Trainer: {'.'.join(path)} is given twice; leave one of them out")
        table[last] = str(value) if isinstance(value, Path) else value
        return
    if not isinstance(table.setdefault(last, {}), dict):
        raise ConfigError(f"Trainer: {'.'.join(path)} is given twice; leave one of them out")
    for key, inner in value.items():
        if not isinstance(key, str):
            raise ConfigError(f"Trainer: {'.'.join(path)} has the key {key!r}, which is not text")
        _put(table[last], [key], inner, name)


def _object(tables: dict[str, Any], table: str, key: str) -> Any:
    """Take a setting that is an object, not the name of one, out of its table."""
    inner = tables.get(table)
    if isinstance(inner, dict) and not isinstance(inner.get(key), str | None):
        return inner.pop(key)
    return None
