"""Plugins: presets, executors, engines, learners, rewards and sinks from outside the library.

A setting such as `runner.executor` names a built-in ("async"), an entry point of an installed
package in the group `agentrl.executors`, or an object in a user's file or module ("file.py:name",
"package.module:name"). An incompatible plugin is refused before the run starts, with file and line.
"""

from __future__ import annotations

import inspect
from collections.abc import Collection
from pathlib import Path
from typing import Any, Literal

from agentrl.base.loading import import_error, load_attribute
from agentrl.base.parts import installed_plugins, missing
from agentrl.base.user_code import contained
from agentrl.errors import ConfigError, nearest

Kind = Literal[
    "presets", "executors", "engines", "learners", "sinks", "rewards", "harnesses", "tool_formats",
    "environments",
]  # fmt: skip


def load_plugin(kind: Kind, name: str, own: Collection[str], root: Path, *, key: str) -> Any:
    """The object that `name` refers to, or None if it is one of the built-in names `own`.

    root: the folder of files; key: the setting, for messages. Raises ConfigError for an unknown
    name, a failed import, or an entry point with the name of a built-in."""
    if ":" in name:
        return load_attribute(name, root, key=key)
    registered = {point.name: point for point in installed_plugins(kind)}
    if len(several := sorted({x.value for x in installed_plugins(kind) if x.name == name})) > 1:
        raise ConfigError(
            f"{key} = {name!r}: the entry points {' and '.join(several)} of the group"
            f" agentrl.{kind} have one name; one of their packages must choose another"
        )
    if hidden := sorted(registered.keys() & set(own)):
        raise ConfigError(
            f"{key}: the entry point {registered[hidden[0]].value} of the group agentrl.{kind}"
            f" hides the library's own {hidden[0]!r}; its package must choose another name"
        )
    if name in own:
        return None
    if name not in registered:
        hint = f"{nearest(name, [*own, *registered])}, or your own as file.py:name"
        raise ConfigError(f"{key} = {name!r}; {missing(kind, name) or hint}")
    point = registered[name]
    try:
        with contained():
            return point.load()
    except Exception as error:  # another package's module may raise anything
        raise import_error(f"{key} = {name!r}: importing {point.value}", error) from error


def check_call(thing: object, *arguments: str, key: str) -> None:
    """Raises ConfigError unless `thing` can be called with these positional arguments."""
    if not callable(thing):
        raise ConfigError(
            f"{key}: {where(thing)} is {type(thing).__name__}, not a function or class"
        )
    try:
        inspect.signature(thing).bind(*arguments)
    except (TypeError, ValueError) as error:
        raise ConfigError(
            f"{key}: {where(thing)} must take ({', '.join(arguments)}): {error}"
        ) from None


def check_protocol(made: object, protocol: type, *, by: object, key: str) -> None:
    """Raises ConfigError unless `made` has every public method of a protocol. by: the class `made`,
    or the function that returned it."""
    wanted = [name for name, item in vars(protocol).items() if callable(item) and name[0] != "_"]
    missing = [name for name in wanted if not callable(getattr(made, name, None))]
    if missing:
        verb = "is" if made is by else f"returned {type(made).__name__}, which is"
        raise ConfigError(
            f"{key}: {where(by)} {verb} no {protocol.__name__}: it has no {', '.join(missing)}"
        )


def where(thing: object) -> str:
    """Name, file and line of a user's function or class."""
    name = getattr(thing, "__qualname__", repr(thing))
    try:
        line = inspect.getsourcelines(thing)[1]  # type: ignore[arg-type]
        return f"{name} ({inspect.getsourcefile(thing)}:{line})"  # type: ignore[arg-type]
    except (OSError, TypeError):
        return name
