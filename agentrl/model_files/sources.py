"""Where a model comes from: a GGUF file, or a folder or a package with one."""

from __future__ import annotations

from collections.abc import Iterator
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path

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
