"""Base classes and number types of the run file's tables."""

from __future__ import annotations

from collections.abc import Iterator
from types import UnionType
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, get_args

import msgspec

if TYPE_CHECKING:
    from agentrl.core.config.schema import RunConfig


Count = Annotated[int, msgspec.Meta(ge=1)]
Natural = Annotated[int, msgspec.Meta(ge=0)]
Seconds = Annotated[float, msgspec.Meta(gt=0)]
Positive = Annotated[float, msgspec.Meta(gt=0)]
NonNegative = Annotated[float, msgspec.Meta(ge=0)]
Port = Annotated[int, msgspec.Meta(ge=0, le=65535)]
Name = Annotated[str, msgspec.Meta(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")]
EXTERNAL = "external"  # tag of kinds from outside the library; `factory` has the given name


class Section(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Base of the run file's tables."""

    def problems(self, config: RunConfig) -> Iterator[str]:
        """Error messages about this table in a run's settings; each names the key."""
        return iter(())


class KindSection(Section, frozen=True):
    """Base of tables with several kinds, selected by the key `kind`."""

    packages: ClassVar[tuple[str, ...]] = ()  # whose versions matter; the doctor shows them

    @property
    def kind(self) -> str:
        return kind_of(self)

    @property
    def lacking(self) -> str:
        """What this machine lacks for this kind, as "sentence; fix", for the doctor."""
        return ""


def kind_of(section: Section) -> str:
    """The name of a table's kind in the run file."""
    return getattr(section, "factory", "") or str(section.__struct_config__.tag)


def tables(section: Section) -> Iterator[Section]:
    """All tables inside a table, at any depth, including tables by name."""
    for key in section.__struct_fields__:
        value = getattr(section, key)
        for inner in value.values() if isinstance(value, dict) else [value]:
            if isinstance(inner, Section):
                yield inner
                yield from tables(inner)


def structs_of(kind: Any) -> tuple[type[msgspec.Struct], ...]:
    """The structs in a type, which may be a union."""
    members = get_args(kind) if isinstance(kind, UnionType) else (kind,)
    return tuple(
        member
        for member in members
        if isinstance(member, type) and issubclass(member, msgspec.Struct)
    )


def field_types(section: type[msgspec.Struct]) -> dict[str, Any]:
    return {field.name: field.type for field in msgspec.structs.fields(section)}
