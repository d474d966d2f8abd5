"""Load run files: TOML to typed settings. An unknown key is an error with its path."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import msgspec

from agentrl.config import derived, validate
from agentrl.config.hints import syntax_hint
from agentrl.config.infrastructure import TorchLearnerConfig
from agentrl.config.keys import check_keys, flatten, format_validation_error
from agentrl.config.schema import RunConfig
from agentrl.errors import ConfigError
from agentrl.store.urls import split_secret

DEEPEST = 100  # tables and arrays inside each other, and parts of a dotted key
LONGEST_SHOWN = 80  # characters of a setting in an error
TOO_DEEP = f"it has a key or value of more than {DEEPEST} levels; no setting is so deep"
TOO_LARGE = "it has an integer of more than 64 bits, which TOML does not allow"
# A dotted key, where one may begin; nothing of it is read twice.
LONG_KEY = re.compile(
    r"""(?:^|[\[{,])[ \t]*+(?:(?:[\w-]++|"[^"\n]*+"|'[^'\n]*+')[ \t]*+\.[ \t]*+)"""
    rf"{{{DEEPEST}}}",
    re.MULTILINE,
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
        said = f"not a readable TOML file: {error}{syntax_hint(text, str(error))}"
        raise ConfigError(f"{path}: {said}") from None
    data.setdefault("root", str(path.parent.resolve()))
    overrides = list(overrides)
    if "name" not in data and not any(each.startswith("name=") for each in overrides):
        data |= {"name": path.parent.resolve().name, "file": str(path.resolve())}
    return resolve(data, source=str(path), overrides=overrides)


def read_toml(text: str) -> dict[str, Any]:
    """Read TOML, in time linear in the text: `tomllib` takes the square of a long dotted key, and
    fails on deep values by the recursion limit. Raises ValueError with a sentence."""
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
    for _ in range(DEEPEST + 1):
        if any(isinstance(one, int) and one.bit_length() > 63 for one in level):
            raise ValueError(TOO_LARGE)
        tables = [one.values() for one in level if isinstance(one, dict)]
        arrays = [one for one in level if isinstance(one, list)]
        level = [inner for one in (*tables, *arrays) for inner in one]
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


def to_toml(config: RunConfig) -> str:
    """The resolved settings as a run file, for `--dry-run`."""
    lines: list[str] = []

    def table(values: Mapping[str, Any], prefix: str) -> None:
        plain = {k: v for k, v in values.items() if not isinstance(v, dict) and v is not None}
        if prefix and (plain or not values):
            lines.append(f"\n[{prefix}]")
        lines.extend(f"{_toml_key(key)} = {_toml_value(value)}" for key, value in plain.items())
        for key, value in values.items():
            if isinstance(value, dict):
                table(value, f"{prefix}.{_toml_key(key)}" if prefix else key)

    public, _ = split_secret(config.store)
    values = msgspec.to_builtins(msgspec.structs.replace(config, store=public))
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
    ignored |= {"file", "metrics", "max_empty_steps", "max_failed", "checkpoint"}
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
        raise ConfigError(f"override {override[:LONGEST_SHOWN]!r}: {error}") from None
    *parents, last = key.split(".")
    if len(parents) > DEEPEST:
        raise ConfigError(f"override {override[:LONGEST_SHOWN]!r}: {TOO_DEEP}")
    table = data
    for parent in parents:
        table = table.setdefault(parent, {})
        if not isinstance(table, dict):
            raise ConfigError(f"override {override!r}: {parent!r} is a value, not a table")
    table[last] = value


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
