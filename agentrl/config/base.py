"""Base classes and number types of the run file's tables."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from functools import reduce
from operator import or_
from types import GenericAlias, UnionType
from typing import Annotated, Any, ClassVar, TypeVar, get_args

import msgspec

from agentrl.base.parts import installed_plugins

Count = Annotated[int, msgspec.Meta(ge=1)]
Natural = Annotated[int, msgspec.Meta(ge=0)]
Seconds = Annotated[float, msgspec.Meta(gt=0)]
Positive = Annotated[float, msgspec.Meta(gt=0)]
NonNegative = Annotated[float, msgspec.Meta(ge=0)]
Port = Annotated[int, msgspec.Meta(ge=0, le=65535)]
Name = Annotated[str, msgspec.Meta(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")]


log = logging.getLogger(__name__)
EXTERNAL = "external"  # tag of kinds from outside the library; `factory` has the given name


class Section(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Base of the run file's tables."""

    plays: ClassVar[bool] = False  # of a part's table: whether rollouts depend on it
    # Whether it gives rollouts a reward: one of several tables by name, which is the reward's.
    gives_reward: ClassVar[bool] = False
    makes_weights: ClassVar[bool] = False  # whether a run may begin with others than its policy's

    @property
    def replaces_rollouts(self) -> bool:
        """Whether a run learns from what this table names, and plays no rollouts."""
        return False

    def problems(self, config: Any) -> Iterator[str]:
        """Error messages about this table in a run's settings; each names the key."""
        return iter(())

    def initial(self, config: Any, policy: Any) -> Any:
        """The `PolicyConfig` of the weights that the first step trains, once they are made."""
        return policy

    def evaluated(self, config: Any) -> Section:
        """The table in an evaluation of the run with these settings."""
        return self


S = TypeVar("S", bound=Section)


def tables(config: Section) -> Iterator[tuple[str, Section]]:
    """The tables of a run's settings by their paths, those by name too: `judges.quality`."""
    for key in config.__struct_fields__:
        value = getattr(config, key)
        if isinstance(value, Section):
            yield key, value
        elif isinstance(value, dict):
            named = ((f"{key}.{name}", own) for name, own in value.items())
            yield from ((path, own) for path, own in named if isinstance(own, Section))


def without_making(config: S) -> S:
    """The settings of a run that begins with the weights of its policy as they are."""
    made = {key: type(own)() for key, own in tables(config) if own.makes_weights}
    return msgspec.structs.replace(config, **made)


def kind_of(section: Section) -> str:
    """The name of a table's kind in the run file."""
    return getattr(section, "factory", "") or str(section.__struct_config__.tag)


class Joining(Section, frozen=True):
    """Base of a part's tables in [algorithm] by which more rollouts join a group when its own have
    ended."""

    plays: ClassVar[bool] = True
    trains: ClassVar[bool] = False  # whether these may be trained

    @property
    def joins(self) -> bool:
        """Whether the settings ask for any."""
        return False


class KindSection(Section, frozen=True):
    """Base of tables with several kinds, selected by the key `kind`."""

    packages: ClassVar[tuple[str, ...]] = ()  # whose versions matter; the doctor shows them

    @property
    def kind(self) -> str:
        return kind_of(self)

    @property
    def lacking(self) -> str:
        """What this machine lacks for this kind, as "sentence; cure", for the doctor."""
        return ""


def with_parts(section: type[S], path: str = "") -> type[S]:
    """The table at `path` of the run file with the tables that installed parts add to it."""
    added = dict[str, tuple[Any, Any]]()
    for point in installed_plugins("tables"):
        parent, _, key = point.name.rpartition(".")
        if parent == path:
            kind = point.load()
            by_name = isinstance(
                kind.__origin__ if hasattr(kind, "__metadata__") else kind, GenericAlias
            )
            added[key] = (kind, {} if by_name else (structs_of(kind) or (str,))[0]())
    if not added:
        return section
    body = {key: default for key, (_, default) in added.items()}
    body["__annotations__"] = {key: kind for key, (kind, _) in added.items()}
    body |= {"__module__": section.__module__, "__doc__": section.__doc__}
    build: Any = type(section)
    made: type[S] = build(section.__name__, (section,), body, frozen=True, kw_only=True)
    return made


def kinds(table: str, *own: type[Section]) -> Any:
    """The kinds of a table: those of parts are before the last of its own, which is a plug-in's."""
    points = installed_plugins("kinds")
    parts = [point.load() for point in points if point.name.rpartition(".")[0] == table]
    return reduce(or_, (*own[:-1], *parts, own[-1]))


def played_tables(config: Section) -> list[str]:
    """The parts' tables on which rollouts depend."""
    return list({path.partition(".")[0]: None for path, table in tables(config) if table.plays})


def optional(config: Any, path: str) -> Any:
    """A setting of a part, or None if the part is not installed."""
    for key in path.split("."):
        config = getattr(config, key, None)
    return config


def structs_of(kind: Any) -> tuple[type[msgspec.Struct], ...]:
    """The structs in a type, which may be a union."""
    every = get_args(kind) if isinstance(kind, UnionType) else (kind,)
    return tuple(one for one in every if isinstance(one, type) and issubclass(one, msgspec.Struct))


def field_types(section: type[msgspec.Struct]) -> dict[str, Any]:
    return {field.name: field.type for field in msgspec.structs.fields(section)}
