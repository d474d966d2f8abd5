"""Presets, executors, engines, learners, rewards and metrics sinks from outside the library.

A setting such as `runner.executor` names one of the library's own ("pool"), one that an installed
package registers as an entry point of the group `agentrl.executors`, or one in a file or module of
the user's ("file.py:name", "package.module:name"). A plugin that does not fit is refused before the
run starts, with the file and line where it is written.
"""

from __future__ import annotations

import inspect
from collections.abc import Collection
from pathlib import Path
from typing import Any, Literal

from agentrl.config.base import installed_plugins
from agentrl.errors import ConfigError, nearest
from agentrl.loading import import_error, load_attribute

Kind = Literal["presets", "executors", "engines", "learners", "sinks", "rewards", "harnesses"]


def load_plugin(kind: Kind, name: str, own: Collection[str], root: Path, *, key: str) -> Any:
    """The object that `name` stands for, or None where it is one of the library's `own` names.

    root: the folder in which files are looked up; key: the setting, for messages. Raises
    ConfigError when nothing has that name, its import fails, or a package hides one of `own`."""
    if ":" in name:
        return load_attribute(name, root, key=key)
    registered = {point.name: point for point in installed_plugins(kind)}
    if hidden := sorted(registered.keys() & set(own)):
        raise ConfigError(
            f"{key}: the entry point {registered[hidden[0]].value} of the group agentrl.{kind}"
            f" hides the library's own {hidden[0]!r}; its package must choose another name"
        )
    if name in own:
        return None
    if name not in registered:
        raise ConfigError(
            f"{key} = {name!r}; {nearest(name, [*own, *registered])}, or your own as file.py:name"
        )
    point = registered[name]
    try:
        return point.load()
    except Exception as error:  # another package's module is a boundary: anything can happen
        raise import_error(f"{key} = {name!r}: importing {point.value}", error) from error


def check_call(thing: object, *arguments: str, key: str) -> None:
    """Raises ConfigError unless `thing` can be called with positional arguments so named."""
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
    """Raises ConfigError unless what `by` returned, or the class `by`, has every public method
    of a protocol."""
    wanted = [name for name, item in vars(protocol).items() if callable(item) and name[0] != "_"]
    missing = [name for name in wanted if not callable(getattr(made, name, None))]
    if missing:
        verb = "is" if made is by else f"returned {type(made).__name__}, which is"
        raise ConfigError(
            f"{key}: {where(by)} {verb} no {protocol.__name__}: it has no {', '.join(missing)}"
        )


def where(thing: object) -> str:
    """Name, file and line of a function or class of the user's."""
    name = getattr(thing, "__qualname__", repr(thing))
    try:
        line = inspect.getsourcelines(thing)[1]  # type: ignore[arg-type]
        return f"{name} ({inspect.getsourcefile(thing)}:{line})"  # type: ignore[arg-type]
    except (OSError, TypeError):
        return name
