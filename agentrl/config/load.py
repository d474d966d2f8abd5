"""The run file: TOML into typed settings. An unknown key is an error with its path.

The settings themselves are in `sections` and `deployment`, what they mean together in `checks`;
everybody else has them from here.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import msgspec

from agentrl.config import validate
from agentrl.config.keys import check_keys, flatten, said
from agentrl.config.schema import RunConfig
from agentrl.errors import ConfigError
from agentrl.store.urls import split_secret


def load(path: Path, overrides: Iterable[str] = ()) -> RunConfig:
    """Read a run file and apply `key.sub=value` overrides.

    Raises ConfigError naming the file, the key and the nearest valid name."""
    try:
        data = tomllib.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ConfigError(f"{path}: no such run file; give the path of a TOML file") from None
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise ConfigError(f"{path}: not a readable TOML file: {error}") from None
    data.setdefault("root", str(path.parent.resolve()))
    data.setdefault("name", path.parent.resolve().name)
    for override in overrides:
        _apply(data, override)
    return resolve(data, source=str(path))


def resolve(data: Mapping[str, Any], *, source: str) -> RunConfig:
    """Typed settings from a mapping, with every path absolute."""
    check_keys(RunConfig, data, prefix="", source=source)
    try:
        config = msgspec.convert(data, RunConfig)
    except msgspec.ValidationError as error:
        raise ConfigError(f"{source}: {said(str(error))}") from None
    validate.check(config, source)
    output = Path(config.output or Path("runs", config.name)).resolve()
    return msgspec.structs.replace(
        config,
        root=str(Path(config.root).resolve()),
        output=str(output),
        store=config.store or f"sqlite:///{output / 'store.db'}",
    )


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
    table(msgspec.to_builtins(msgspec.structs.replace(config, store=public)), "")
    return "\n".join(lines) + "\n"


def differences(old: RunConfig, new: RunConfig) -> list[str]:
    """Settings that would change what a run learns, as "key: old -> new"."""
    ignored = {"root", "output", "store", "steps", "keep_checkpoints", "eval", "runner", "engine"}
    ignored |= {"metrics", "max_empty_steps"}
    # Either learner goes on from the other's checkpoint, on any number of GPUs.
    placement = ("learner.kind", "learner.packing", "learner.verl.")
    before, after = (
        _moved(flatten(msgspec.to_builtins(config)), Path(config.output))
        | {"policies": list(config.policies)}  # their order
        for config in (old, new)
    )
    return [
        f"{key}: {before.get(key)!r} -> {after.get(key)!r}"
        for key in sorted(before.keys() | after.keys())
        if key.split(".")[0] not in ignored
        and not key.startswith(placement)
        and before.get(key) != after.get(key)
    ]


def _moved(values: Mapping[str, Any], output: Path) -> dict[str, Any]:
    """The values, with what is in the output folder by its path from there."""
    return {
        key: str(Path(value).relative_to(output))
        if isinstance(value, str) and Path(value).is_relative_to(output)
        else value
        for key, value in values.items()
    }


def _apply(data: dict[str, Any], override: str) -> None:
    key, equals, text = override.partition("=")
    if not equals or not key:
        raise ConfigError(f"override {override!r}: write it as key.sub=value")
    try:
        value = tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        value = text  # a bare word is a string: no quoting on the command line
    *parents, last = key.split(".")
    table = data
    for parent in parents:
        table = table.setdefault(parent, {})
        if not isinstance(table, dict):
            raise ConfigError(f"override {override!r}: {parent!r} is a value, not a table")
    table[last] = value


def _toml_key(key: str) -> str:
    return key if re.fullmatch(r"[A-Za-z0-9_-]+", key) else msgspec.json.encode(key).decode()


def _toml_value(value: object) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, list):
        return f"[{', '.join(map(_toml_value, value))}]"
    return msgspec.json.encode(value).decode() if isinstance(value, str) else repr(value)
