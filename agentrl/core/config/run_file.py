"""The settings of a run: from a run file, from Python or from a store, and how they are written.

An unknown key is an error with its path. Values of `agent.env` are kept out of a run's store and
files, which contain only the names: the process that starts a run passes them to its runners in the
environment, and runners on other machines read them from their own.
"""

from __future__ import annotations

import os
import re
import tomllib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from agentrl.core.config import derived, validate
from agentrl.core.config.derived import syntax_hint
from agentrl.core.config.infrastructure import TorchLearnerConfig
from agentrl.core.config.schema import RunConfig
from agentrl.core.config.validate import check_keys, flatten, format_validation_error
from agentrl.core.errors import ConfigError
from agentrl.core.loading import load_tasks
from agentrl.core.types import Json

MAX_DEPTH = 100  # tables and arrays inside each other, and parts of a dotted key
MAX_SHOWN_CHARS = 80  # characters of a setting in an error
TOO_DEEP = f"it has a key or value of more than {MAX_DEPTH} levels; no setting is that deep"
TOO_LARGE = "it has an integer of more than 64 bits, which TOML does not allow"
# A dotted key, where one may begin; nothing of it is read twice.
LONG_KEY = re.compile(
    r"""(?:^|[\[{,])[ \t]*+(?:(?:[\w-]++|"[^"\n]*+"|'[^'\n]*+')[ \t]*+\.[ \t]*+)"""
    rf"{{{MAX_DEPTH}}}",
    re.MULTILINE,
)

AGENT_ENV = "AGENTRL_AGENT_ENV"  # JSON object of the values of agent.env
# A parameter of `Trainer` that is not a table is the first setting of its table.
FIRST_SETTINGS = {"agent": "path", "tasks": "train", "verifier": "path", "policy": "model"}
OBJECTS = (
    *(("agent", "path"), ("verifier", "path"), ("tasks", "train"), ("tasks", "heldout")),
    ("warmup", "data"),
)


def load(path: Path, overrides: Iterable[str] = ()) -> RunConfig:
    """Read a run file and apply `key.sub=value` overrides.

    Raises ConfigError naming the file, the key and the nearest valid name."""
    text = ""
    try:
        data = read_toml(text := path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ConfigError(f"{path}: no such run file; give the path of a TOML file") from None
    except (OSError, ValueError) as error:
        problem = f"not a readable TOML file: {error}{syntax_hint(text, str(error))}"
        raise ConfigError(f"{path}: {problem}") from None
    data.setdefault("root", str(path.parent.resolve()))
    overrides = list(overrides)
    if "name" not in data and not any(override.startswith("name=") for override in overrides):
        data |= {"name": path.parent.resolve().name, "file": str(path.resolve())}
    return resolve(data, source=str(path), overrides=overrides)


def read_toml(text: str) -> dict[str, Any]:
    """Read TOML, in time linear in the text: `tomllib` is quadratic in the length of a dotted key,
    and hits the recursion limit on deep values. Raises ValueError with a sentence."""
    if LONG_KEY.search(text):
        raise ValueError(TOO_DEEP)
    try:
        data = tomllib.loads(text)
    except RecursionError:
        raise ValueError(TOO_DEEP) from None
    except tomllib.TOMLDecodeError:
        raise
    except ValueError:  # Python reads no integer of more than 4,300 digits
        raise ValueError(TOO_LARGE) from None
    level: list[Any] = [data]
    for _ in range(MAX_DEPTH + 1):
        if any(isinstance(value, int) and value.bit_length() > 63 for value in level):
            raise ValueError(TOO_LARGE)
        tables = [value.values() for value in level if isinstance(value, dict)]
        arrays = [value for value in level if isinstance(value, list)]
        level = [inner for value in (*tables, *arrays) for inner in value]
        if not level:
            return data
    raise ValueError(TOO_DEEP)


def resolve(data: Mapping[str, Any], *, source: str, overrides: Iterable[str] = ()) -> RunConfig:
    """Typed, validated settings from a mapping, with absolute paths."""
    data = dict(data)
    for override in overrides:
        apply_override(data, override)
    roles = data.get("roles")
    if isinstance(roles, dict) and isinstance(rules := roles.get("match"), list):
        named = {role: player for role, player in roles.items() if role != "match"}
        data = {**data, "roles": named, "role_rules": rules}
    try:
        config = msgspec.convert(check_keys(RunConfig, data, source=source), RunConfig)
    except msgspec.ValidationError as error:
        raise ConfigError(f"{source}: {format_validation_error(str(error))}") from None
    config = derived.derive(config)
    validate.check(config, source)
    output = Path(config.output or Path("runs", config.name)).resolve()
    return msgspec.structs.replace(
        config,
        root=str(Path(config.root).resolve()),
        output=str(output),
        store=config.store or store_in(output),
    )


class TrainerArguments(NamedTuple):
    """tables: as in a run file, without the settings that are objects: the other fields. None: not
    an object."""

    tables: dict[str, Any]
    agent: Any = None
    verifier: Any = None
    train: Any = None
    heldout: Any = None
    demonstrations: Any = None


def trainer_arguments(
    parameters: Mapping[str, Any], heldout: Any, settings: Mapping[str, Any]
) -> TrainerArguments:
    """The arguments of a call of `Trainer`. parameters: of the names in FIRST_SETTINGS, each a
    table or the first setting of one. Raises ConfigError for a setting that is given twice."""
    tables: dict[str, Any] = {}
    for name, value in parameters.items():
        if isinstance(value, Mapping):
            _put(tables, [name], value, name)
        elif value is not None and not (isinstance(value, str) and not value):
            path = isinstance(value, Path)
            _put(tables, [name, FIRST_SETTINGS[name]], str(value) if path else value, name)
    if not (isinstance(heldout, str) and not heldout):
        _put(tables, ["tasks", "heldout"], heldout, "heldout")
    for name, value in settings.items():
        _put(tables, name.split("."), value, name)
    return TrainerArguments(tables, *(_object(tables, *place) for place in OBJECTS))


def store_in(output: Path) -> str:
    """URL of the default store, in a run's output folder."""
    return f"sqlite:///{output / 'store.db'}"


def store_of(name: str) -> str:
    """URL of a run's default store below the working directory. name: of the run or a rollout."""
    return store_in(Path("runs", name.split("/")[0]).resolve())


def from_store(data: Mapping[str, Any]) -> RunConfig:
    """The settings of a run from its store. Raises ConfigError if this version cannot read them."""
    try:
        return msgspec.convert(check_keys(RunConfig, data, source="store"), RunConfig)
    except msgspec.ValidationError as error:
        raise ConfigError(f"store: {format_validation_error(str(error))}") from None


def tasks_of(config: RunConfig, split: str) -> list[dict[str, Json]]:
    """The tasks of a run, none if its settings name none. split: train or heldout. Raises
    ConfigError."""
    path, columns = getattr(config.tasks, split), config.tasks.columns
    key = f"tasks.{split}"
    return load_tasks(path, Path(config.root), key=key, columns=columns) if path else []


def without_env_values(config: RunConfig) -> RunConfig:
    """The settings without the values of `agent.env`, which move to this process's environment. A
    second call changes nothing."""
    stored = _env_values()
    values = {
        name: value for name, value in config.agent.env.items() if value or name not in stored
    }
    if values:
        os.environ[AGENT_ENV] = msgspec.json.encode(stored | values).decode()
    return _with_env(config, dict.fromkeys(config.agent.env, ""))


def with_env_values(config: RunConfig) -> RunConfig:
    """The settings with the values of `agent.env`. Raises ConfigError for a variable that has none
    here."""
    configured = {name: value for name, value in config.agent.env.items() if value}
    available = os.environ | _env_values() | configured
    for name in config.agent.env:
        if name not in available:
            raise ConfigError(
                f"agent.env: {name} has no value on this machine, because the store does not keep"
                " values; set it in the environment of the runner"
            )
    return _with_env(config, {name: available[name] for name in config.agent.env})


def to_toml(config: RunConfig) -> str:
    """The resolved settings as a run file, for `--dry-run`. The URL of the store is written as it
    is; the caller splits off its secret."""
    lines: list[str] = []

    def table(values: Mapping[str, Any], prefix: str) -> None:
        plain = {k: v for k, v in values.items() if not isinstance(v, dict) and v is not None}
        if prefix and (plain or not values):
            lines.append(f"\n[{prefix}]")
        lines.extend(f"{_toml_key(key)} = {_toml_value(value)}" for key, value in plain.items())
        for key, value in values.items():
            if isinstance(value, dict):
                table(value, f"{prefix}.{_toml_key(key)}" if prefix else key)

    values = msgspec.to_builtins(config)
    del values["file"], values["live"]["running"]  # agentrl sets them
    for section, field in (("engine", "kind"), ("learner", "kind"), ("runner", "executor")):
        if "factory" in values[section]:
            values[section][field] = values[section].pop("factory")
    if rules := values.pop("role_rules"):
        values["roles"]["match"] = rules
    table(values, "")
    return "\n".join(lines) + "\n"


def differences(old: RunConfig, new: RunConfig) -> list[str]:
    """Settings that would change what a run learns, as "key: old -> new"."""
    old, new = map(derived.without_interpreter, (old, new))
    ignored = {"root", "output", "store", "steps", "keep_checkpoints", "eval", "runner", "engine"}
    ignored |= {"file", "metrics", "checkpoint"}
    # Each learner can resume from the other's checkpoint, wherever it computes.
    moved = {key for config in (old, new) for key in config.learner.placement}
    placement = ("learner.kind", *(f"learner.{key}" for key in moved))
    base = flatten({"learner": msgspec.to_builtins(TorchLearnerConfig())})
    before, after = (
        base | _by_relative_path(config) | {"policies": list(config.policies)}  # their order
        for config in (old, new)
    )
    return [
        f"{key}: {before.get(key)!r} -> {after.get(key)!r}"
        for key in sorted(before.keys() | after.keys())
        if key.split(".")[0] not in ignored
        and not key.startswith(placement)
        and before.get(key) != after.get(key)
    ]


def _by_relative_path(config: RunConfig) -> dict[str, Any]:
    """The settings with dotted keys, and with paths below the output folder relative to it."""
    values = flatten(msgspec.to_builtins(config))
    for key, value in values.items():
        if isinstance(value, str) and Path(value).is_relative_to(config.output):
            values[key] = str(Path(value).relative_to(config.output))
    return values


def apply_override(data: dict[str, Any], override: str) -> None:
    """Set a key of settings in place, as `key.sub=value` says. Raises ConfigError."""
    key, equals, text = override.partition("=")
    if not equals or not key:
        raise ConfigError(f"override {override!r}: write it as key.sub=value")
    try:
        value = read_toml(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        value = text  # a bare word is a string, so the command line needs no quotes
    except ValueError as error:
        raise ConfigError(f"override {override[:MAX_SHOWN_CHARS]!r}: {error}") from None
    *parents, last = key.split(".")
    if len(parents) > MAX_DEPTH:
        raise ConfigError(f"override {override[:MAX_SHOWN_CHARS]!r}: {TOO_DEEP}")
    table = data
    for parent in parents:
        table = table.setdefault(parent, {})
        if not isinstance(table, dict):
            raise ConfigError(f"override {override!r}: {parent!r} is a value, not a table")
    table[last] = value


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


def _env_values() -> dict[str, str]:
    return msgspec.json.decode(os.environ.get(AGENT_ENV, "{}"), type=dict[str, str])


def _with_env(config: RunConfig, env: dict[str, str]) -> RunConfig:
    return msgspec.structs.replace(config, agent=msgspec.structs.replace(config.agent, env=env))


def _toml_key(key: str) -> str:
    return key if re.fullmatch(r"[A-Za-z0-9_-]+", key) else _toml_value(key)


def _toml_value(value: object) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(_toml_value, value))}]"
    if isinstance(value, dict):
        items = (f"{_toml_key(k)} = {_toml_value(v)}" for k, v in value.items() if v is not None)
        return f"{{{', '.join(items)}}}"
    if isinstance(value, str):  # JSON allows the control character U+007F, TOML does not
        return msgspec.json.encode(value).decode().replace("\x7f", "\\u007f")
    return repr(value)
