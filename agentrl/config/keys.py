"""Check the keys of run files against the tables, with errors that name the key."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, get_args

import msgspec

from agentrl.config.base import EXTERNAL, field_types, structs_of
from agentrl.config.hints import setting_hint
from agentrl.config.learning import LoraConfig, MemberConfig
from agentrl.config.policies import TABLES
from agentrl.config.schema import RunConfig
from agentrl.errors import ConfigError, nearest
from agentrl.plugins import Group, plugin_points

Struct = type[msgspec.Struct]
Structs = tuple[Struct, ...]
OVERRIDDEN: dict[str, Any] = {"lora": LoraConfig, **TABLES}  # by one of several policies
# Tables whose kinds may be plug-ins
PLUGINS: dict[str, Group] = {"engine": "engines", "learner": "learners", "runner": "executors"}


def flatten(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Nested tables as a single one with dotted keys."""
    flat: dict[str, Any] = {}
    for key, value in values.items():
        if isinstance(value, dict):
            flat |= flatten(value, f"{prefix}{key}.")
        else:
            flat[prefix + key] = value
    return flat


def check_keys(
    section: Struct, data: Mapping[str, Any], *, source: str, prefix: str = ""
) -> dict[str, Any]:
    """The table in the form that msgspec can convert to `section`: adds the tags of kinds, and
    removes settings of other kinds that have their default values.

    Raises ConfigError for an unknown key in the table or a nested one."""
    return _Reader(source).table((section,), data, prefix)


class _Reader:
    def __init__(self, source: str) -> None:
        self.source = source

    def table(self, kinds: Structs, data: Mapping[str, Any], path: str) -> dict[str, Any]:
        """kinds: the types of the table, one per kind, the default first."""
        section, table = self._choose(kinds, dict(data), path)
        types = field_types(section) | (OVERRIDDEN if section is MemberConfig else {})
        for key, value in list(table.items()):
            if key in types:
                table[key] = self._value(types[key], value, f"{path}{key}.")
            elif key != section.__struct_config__.tag_field:
                self._check_other(kinds, section, table, key, path)
                del table[key]
        return table

    def _value(self, kind: Any, value: Any, path: str) -> Any:
        if not isinstance(value, dict):
            return value
        if structs := structs_of(kind):
            return self.table(structs, value, path)
        if get_args(kind) and (structs := structs_of(get_args(kind)[-1])):  # tables by name
            return {
                name: self._value(get_args(kind)[-1], inner, f"{path}{name}.")
                for name, inner in value.items()
            }
        return value

    def _choose(
        self, kinds: Structs, data: dict[str, Any], path: str
    ) -> tuple[Struct, dict[str, Any]]:
        """The type of a table, by its tag, and the table with that tag and with the optional table
        of the kind's own settings."""
        field = kinds[0].__struct_config__.tag_field
        if field is None:
            return kinds[0], data
        by_tag = {str(kind.__struct_config__.tag): kind for kind in kinds}
        tag = str(data.setdefault(field, next(iter(by_tag))))
        if tag not in by_tag:
            names = by_tag.keys() - {EXTERNAL}
            if EXTERNAL in by_tag:
                names |= plugin_points(PLUGINS[path[:-1]]).names
            if tag not in names and (EXTERNAL not in by_tag or ":" not in tag):
                raise ConfigError(f"{self.source}: {path}{field} = {tag!r}; {nearest(tag, names)}")
            data |= {field: EXTERNAL, "factory": tag}
        section = by_tag[data[field]]
        if structs_of(field_types(section).get(tag)):
            data.setdefault(tag, {})
        return section, data

    def _check_other(
        self, kinds: Structs, section: Struct, data: dict[str, Any], key: str, path: str
    ) -> None:
        """Raises ConfigError for a key that this kind of table does not have, unless the key
        belongs to another kind and has its default value."""
        others = [kind for kind in kinds if key in field_types(kind)]
        if not others:
            where = f" in [{path.rstrip('.')}]" if path else ""
            known = field_types(section)
            told = setting_hint(key, data[key], known) or nearest(key, known)
            raise ConfigError(f"{self.source}: unknown key {path + key!r}{where}; {told}")
        default = flatten({key: _default_of(others[0], key)})
        given = flatten({key: data[key]})
        changed = [name for name, value in given.items() if value != default.get(name)]
        if changed:
            field = str(section.__struct_config__.tag_field)
            names = (str(other.__struct_config__.tag) for other in others)
            tags = " or ".join(repr(n if n != EXTERNAL else "file.py:name") for n in names)
            raise ConfigError(
                f"{self.source}: {path}{changed[0]} is for {path}{field} = {tags}, and it is "
                f"{data[field]!r}"
            )


def _default_of(section: Struct, name: str) -> Any:
    """The default of a field as JSON; NODEFAULT for a required field."""
    field = next(field for field in msgspec.structs.fields(section) if field.name == name)
    if field.default_factory is not msgspec.NODEFAULT:
        return field.default_factory()
    return msgspec.NODEFAULT if field.required else msgspec.to_builtins(field.default)


def format_validation_error(message: str) -> str:
    """A message of msgspec with the run file's name of the key, and with the allowed values."""
    message = message.replace("$.role_rules", "$.roles.match")
    missing = re.fullmatch(r"Object missing required field `(\w+)`(?: - at `\$\.(.*)`)?", message)
    if missing is not None:
        return f"{missing[2]}.{missing[1]} is missing"
    wrong = re.fullmatch(r"Invalid enum value '(.*)' - at `\$\.(.*)`", message, re.DOTALL)
    if wrong is None:
        return message.replace("`$.", "`").replace("`$`", "the top level")
    kinds: list[Any] = [RunConfig]  # possible types of the key, followed along its path
    for name, inner in re.findall(r"(\w+)(\[\.\.\.\])?", wrong[2]):
        tables = [field_types(struct) for kind in kinds for struct in structs_of(kind)]
        kinds = [table[name] for table in tables if name in table]
        kinds = [get_args(kind)[-1] for kind in kinds] if inner else kinds
    words = (str(word) for kind in kinds for word in get_args(kind))
    return f"{wrong[2]} = {wrong[1]!r}; {nearest(wrong[1], words)}"
