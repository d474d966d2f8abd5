"""Hints at what was meant by a mistake in a run file: names of other libraries or of another table,
and the place of a syntax error. An empty one: nothing is known."""

from __future__ import annotations

import difflib
import re
import tomllib
from collections.abc import Collection, Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any

import msgspec

from agentrl.config.base import field_types, structs_of
from agentrl.config.schema import RunConfig

TABLE = Path(__file__).with_name("other_names.toml")
VERY_CLOSE = 0.8  # a typo of a valid name
MOST_PLACES = 3  # of one name in several tables


@cache
def other_names() -> dict[str, dict[str, list[str]]]:
    return tomllib.loads(TABLE.read_text(encoding="utf-8"))


def preset_hint(name: str, valid: Collection[str]) -> str:
    """The preset that is meant by a name, of those that are valid."""
    plain = name.lower().replace("_", "-")
    known = [plain, *other_names()["presets"].get(_plain(name), ())]
    return _mean([one for one in known if one in valid][:1])


def setting_hint(key: str, value: Any, valid: Collection[str]) -> str:
    """The settings that are meant by a key of the run file or an option of a preset. value: of an
    unknown table, whose keys may be known; valid: keys of its table."""
    if difflib.get_close_matches(key, valid, n=1, cutoff=VERY_CLOSE):
        return ""
    paths = list(dict.fromkeys(_paths(RunConfig)))
    for name in (key, *_leaves(value)):
        listed = other_names()["settings"].get(_plain(name), [])
        same = [path for path in paths if path.rpartition(".")[2] == name]
        if found := listed or (same if len(same) <= MOST_PLACES else []):
            return _mean(found, "" if name == key else f" for its {name}")
    return ""


def syntax_hint(text: str, message: str) -> str:
    """The line of a syntax error in TOML, with a caret below its column."""
    place = re.search(r"\(at line (\d+), column (\d+)\)", message)
    if place is None:
        return ""
    row, column = map(int, place.groups())
    start = f"  {row} | "
    line = text.split("\n")[row - 1].rstrip("\r")
    blank = "".join(char if char == "\t" else " " for char in line[: column - 1])
    return f"\n{start}{line}\n{' ' * len(start)}{blank}^"


def _plain(name: str) -> str:
    return name.lower().replace("-", "_")


def _mean(names: Collection[str], of: str = "") -> str:
    return f"did you mean {' or '.join(map(repr, names))}{of}?" if names else ""


def _leaves(value: Any) -> Iterator[str]:
    for key, inner in value.items() if isinstance(value, Mapping) else ():
        if isinstance(inner, Mapping):
            yield from _leaves(inner)
        else:
            yield str(key)


def _paths(section: type[msgspec.Struct], prefix: str = "") -> Iterator[str]:
    """The dotted names of all settings, without those of tables by name."""
    for key, kind in field_types(section).items():
        yield f"{prefix}{key}"
        for inner in structs_of(kind):
            if tag := inner.__struct_config__.tag_field:
                yield f"{prefix}{key}.{tag}"
            yield from _paths(inner, f"{prefix}{key}.")
