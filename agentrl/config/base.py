"""Base classes and number types of the run file's tables."""

from __future__ import annotations

import sys
from functools import cache
from importlib.metadata import EntryPoints, entry_points
from typing import Annotated

import msgspec

Count = Annotated[int, msgspec.Meta(ge=1)]
Natural = Annotated[int, msgspec.Meta(ge=0)]
Seconds = Annotated[float, msgspec.Meta(gt=0)]
Positive = Annotated[float, msgspec.Meta(gt=0)]
NonNegative = Annotated[float, msgspec.Meta(ge=0)]
Port = Annotated[int, msgspec.Meta(ge=0, le=65535)]
Name = Annotated[str, msgspec.Meta(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")]


EXTERNAL = "external"  # tag of kinds from outside the library; `factory` has the given name


def installed_plugins(kind: str) -> EntryPoints:
    """The entry points in the group `agentrl.<kind>` of all installed packages."""
    return _entry_points(f"agentrl.{kind}", tuple(sys.path))


@cache
def _entry_points(group: str, path: tuple[str, ...]) -> EntryPoints:
    """Cached by `path` (`sys.path`), because reading entry points takes 10 ms."""
    return entry_points(group=group)


class Section(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Base of the run file's tables."""


def kind_of(section: Section) -> str:
    """The name of a table's kind in the run file."""
    return getattr(section, "factory", "") or str(section.__struct_config__.tag)


class KindSection(Section, frozen=True):
    """Base of tables with several kinds, selected by the key `kind`."""

    @property
    def kind(self) -> str:
        return kind_of(self)
