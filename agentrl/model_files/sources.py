"""Where a model comes from: a GGUF file, a folder or a package with one; and a run that names one
without importing it."""

from __future__ import annotations

from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path

from agentrl.config import RunConfig
from agentrl.errors import ConfigError

SUFFIX = ".gguf"


def find(source: str) -> Path:
    """The GGUF file at a path, the only one in a folder, or the only one of an installed package.
    Raises ConfigError if there is none, or more than one."""
    path = Path(source)
    if path.is_file():
        return path
    found = sorted(path.rglob(f"*{SUFFIX}") if path.is_dir() else _of_package(source))
    if not found:
        raise ConfigError(f"{source}: it has no {SUFFIX} file; give one, or what contains one")
    if len(found) > 1:
        names = ", ".join(map(str, found[:5]))
        raise ConfigError(f"{source}: it has {len(found)} {SUFFIX} files; give one of {names}")
    return found[0]


def _of_package(name: str) -> Iterator[Path]:
    try:
        files = distribution(name).files or ()
    except (PackageNotFoundError, ValueError):
        raise ConfigError(
            f"{name}: there is no such file or folder, and no package of this name is installed"
        ) from None
    return (Path(str(file.locate())) for file in files if file.suffix == SUFFIX)


def check(config: RunConfig) -> None:
    """Raise ConfigError for a model of the run that must be imported first."""
    members = config.policies.items()
    named = {f"policies.{name}.model": member.model for name, member in members}
    for key, value in ({"policy.model": config.policy.model} | named).items():
        path = config.path(value)
        if not value or not (file := _only_gguf(path)):
            continue
        target = (file if path.is_file() else path / "model").with_suffix("")
        raise ConfigError(
            f"{key} = {value!r}: a GGUF file cannot be trained as it is; make a Hugging Face "
            f"folder of it, and name that: agentrl model import {file} {target}"
        )


def _only_gguf(path: Path) -> Path | None:
    """The GGUF file that this path names, or that a folder has in place of a checkpoint."""
    if path.is_dir() and not (path / "config.json").is_file():
        return next(path.glob(f"*{SUFFIX}"), None)
    return path if path.suffix == SUFFIX and path.is_file() else None
