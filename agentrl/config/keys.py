"""Keys of the run file: their paths, those that it has, and the nearest to one that it has not."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, get_args

import msgspec

from agentrl.config.schema import RunConfig
from agentrl.errors import ConfigError, nearest


def flatten(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested tables as one, with dotted keys."""
    flat: dict[str, Any] = {}
    for key, value in values.items():
        if isinstance(value, dict):
            flat |= flatten(value, f"{prefix}{key}.")
        else:
            flat[prefix + key] = value
    return flat


def check_keys(
    section: type[msgspec.Struct], data: Mapping[str, Any], *, prefix: str, source: str
) -> None:
    """Raises ConfigError for a key that a table, or one inside it, does not have."""
    types = {field.name: field.type for field in msgspec.structs.fields(section)}
    for key, value in data.items():
        if key not in types:
            where = f" in [{prefix.rstrip('.')}]" if prefix else ""
            raise ConfigError(
                f"{source}: unknown key {prefix + key!r}{where}; {nearest(key, types)}"
            )
        kind = types[key]
        if isinstance(kind, type) and issubclass(kind, msgspec.Struct) and isinstance(value, dict):
            check_keys(kind, value, prefix=f"{prefix}{key}.", source=source)
        elif isinstance(value, dict):
            inner = get_args(kind)[-1] if get_args(kind) else Any
            if isinstance(inner, type) and issubclass(inner, msgspec.Struct):
                for name, table in value.items():
                    if isinstance(table, dict):
                        where = f"{prefix}{key}.{name}."
                        check_keys(inner, table, prefix=where, source=source)


def format_validation_error(message: str) -> str:
    """What msgspec says, with the key as it is in the run file and the words that it may be."""
    wrong = re.fullmatch(r"Invalid enum value '(.*)' - at `\$\.(.*)`", message, re.DOTALL)
    if wrong is None:
        return message.replace("`$.", "`").replace("`$`", "the top level")
    kind: Any = RunConfig
    for name, inner in re.findall(r"(\w+)(\[\.\.\.\])?", wrong[2]):
        kind = next(field.type for field in msgspec.structs.fields(kind) if field.name == name)
        if inner:
            kind = get_args(kind)[-1]
    return f"{wrong[2]} = {wrong[1]!r}; {nearest(wrong[1], map(str, get_args(kind)))}"
