"""Plug-ins: presets, rewards, executors, engines, learners, environments, sinks and stores.

A setting such as `runner.executor` names a built-in plug-in, an entry point of an installed package
in the group `agentrl.executors`, or an object in a user's file or module ("file.py:name",
"package.module:name"). An incompatible plug-in is rejected before the run starts, with file and
line.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Collection, Mapping
from functools import cache
from importlib.metadata import EntryPoint, EntryPoints, entry_points
from pathlib import Path
from typing import Any, Literal

from agentrl.core.errors import ConfigError, nearest
from agentrl.core.loading import import_error, load_attribute
from agentrl.core.user_code import contained

Group = Literal[
    "presets", "rewards", "executors", "engines", "learners", "environments", "sinks", "stores"
]  # fmt: skip

# Built-in plug-ins by group and name, imported at their first use.
BUILT_IN: Mapping[Group, Mapping[str, str]] = {
    "presets": {},
    "rewards": {},
    "executors": {
        "command": "agentrl.runners.executors.factory:command",
        "container": "agentrl.runners.executors.factory:container",
        "kubernetes": "agentrl.runners.executors.factory:kubernetes",
        "pool": "agentrl.runners.executors.factory:pool",
    },
    "engines": {
        "vllm": "agentrl.algorithms.engines.vllm.server:vllm_server",
    },
    "learners": {
        "torch": "agentrl.algorithms.learners.factory:torch_learner",
        "verl": "agentrl.algorithms.learners.verl.learner:verl_learner",
    },
    "environments": {
        "bfcl": "agentrl.environments.plugins.benchmarks:BFCL",
        "gymnasium": "agentrl.environments.plugins.gymnasium:Gymnasium",
        "harbor": "agentrl.harbor:Harbor",
        "inspect": "agentrl.environments.plugins.inspect:Inspect",
        "minigrid": "agentrl.environments.plugins.gymnasium:MiniGrid",
        "openai-evals": "agentrl.environments.plugins.benchmarks:Evals",
        "openenv": "agentrl.environments.plugins.openenv:OpenEnv",
        "pettingzoo": "agentrl.environments.plugins.games:PettingZoo",
        "reasoning-gym": "agentrl.environments.plugins.reasoning_gym:ReasoningGym",
        "tau2": "agentrl.environments.plugins.benchmarks:Tau2",
        "textarena": "agentrl.environments.plugins.games:TextArena",
        "textworld": "agentrl.environments.plugins.gymnasium:TextWorld",
        "verifiers": "agentrl.environments.plugins.verifiers:Verifiers",
        "verifiers-v1": "agentrl.environments.plugins.verifiers:VerifiersV1",
    },
    "sinks": {
        "mlflow": "agentrl.telemetry.trackers:Mlflow",
        "tensorboard": "agentrl.telemetry.trackers:TensorBoard",
        "trackio": "agentrl.telemetry.trackers:Trackio",
        "wandb": "agentrl.telemetry.trackers:Wandb",
    },
    "stores": {
        "http": "agentrl.store.backends:HTTP",
        "https": "agentrl.store.backends:HTTPS",
        "postgres": "agentrl.store.backends:POSTGRES",
        "postgresql": "agentrl.store.backends:POSTGRES",
        "sqlite": "agentrl.store.backends:SQLITE",
    },
}


def plugin_points(group: Group) -> EntryPoints:
    """The plug-ins of a group, built in or of installed packages, without importing them."""
    name = f"agentrl.{group}"
    built_in = [EntryPoint(key, value, name) for key, value in BUILT_IN[group].items()]
    return EntryPoints([*built_in, *_installed(group)])


def _installed(group: Group) -> EntryPoints:
    return _every_entry_point(tuple(sys.path)).get(f"agentrl.{group}", EntryPoints())


@cache
def _every_entry_point(path: tuple[str, ...]) -> dict[str, EntryPoints]:
    """Entry points of all groups of plug-ins. Cached by `path` (`sys.path`), because reading them
    takes 10 ms, for one group or for all."""
    points = entry_points()
    return {
        name: points.select(group=name) for name in points.groups if name.startswith("agentrl.")
    }


def load_plugin(group: Group, name: str, reserved: Collection[str], root: Path, *, key: str) -> Any:
    """The object that `name` refers to, or None if `name` is in `reserved`: the names that the
    caller handles itself, besides those of `BUILT_IN`.

    root: the folder of files; key: the setting, for messages. Raises ConfigError for an unknown
    name, a failed import, or an entry point with the name of a built-in."""
    if ":" in name:
        return load_attribute(name, root, key=key)
    installed, built_in = _installed(group), {*reserved, *BUILT_IN[group]}
    if len(several := sorted({x.value for x in installed if x.name == name})) > 1:
        raise ConfigError(
            f"{key} = {name!r}: the entry points {' and '.join(several)} of the group"
            f" agentrl.{group} have one name; one of their packages must choose another"
        )
    if hidden := [point for point in installed if point.name in built_in]:
        raise ConfigError(
            f"{key}: the entry point {hidden[0].value} of the group agentrl.{group}"
            f" hides the library's own {hidden[0].name!r}; its package must choose another name"
        )
    if name in reserved:
        return None
    points = plugin_points(group)
    if name not in points.names:
        near = nearest(name, [*reserved, *points.names])
        raise ConfigError(f"{key} = {name!r}; {near}, or your own as file.py:name")
    try:
        with contained():
            return points[name].load()
    except Exception as error:  # another package's module may raise anything
        raise import_error(f"{key} = {name!r}: importing {points[name].value}", error) from error


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


def check_protocol(plugin: object, protocol: type, *, source: object, key: str) -> None:
    """Raises ConfigError unless `made` has every public method of a protocol. source:
    the class `plugin`, or the function that returned it."""
    methods = [name for name, item in vars(protocol).items() if callable(item) and name[0] != "_"]
    missing = [name for name in methods if not callable(getattr(plugin, name, None))]
    if missing:
        verb = "is" if plugin is source else f"returned {type(plugin).__name__}, which is"
        raise ConfigError(
            f"{key}: {where(source)} {verb} no {protocol.__name__}: it has no {', '.join(missing)}"
        )


def where(thing: object) -> str:
    """Name, file and line of a user's function or class."""
    name = getattr(thing, "__qualname__", repr(thing))
    try:
        line = inspect.getsourcelines(thing)[1]  # type: ignore[arg-type]
        return f"{name} ({inspect.getsourcefile(thing)}:{line})"  # type: ignore[arg-type]
    except (OSError, TypeError):
        return name
