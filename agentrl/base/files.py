"""Output folders, and atomic files and directories: whole or as before, even if a process is killed
while it writes them."""

from __future__ import annotations

import os
import secrets
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from agentrl.errors import ConfigError

PARTIAL = ".tmp-"  # in the name of a directory that is being written or deleted


@contextmanager
def atomic_directory(path: Path) -> Iterator[Path]:
    """A new directory to write into. It becomes `path` on exit, and is deleted on an error."""
    partial = partial_name(path)
    partial.mkdir(parents=True)
    try:
        yield partial
        share_weights(partial)
        for file in partial.rglob("*"):
            _sync(file)
        _sync(partial)
        if path.exists():
            delete_directory(path)
        partial.rename(path)
        _sync(path.parent)
    finally:
        shutil.rmtree(partial, ignore_errors=True)  # it was renamed, unless an error occurred


def share_weights(path: Path) -> None:
    """Let everybody who may read a folder read the weights in it, or in this file: safetensors
    makes its files readable by their owner alone, so that a container could not serve them."""
    files = path.rglob("*.safetensors") if path.is_dir() else (path,)
    shared = (path if path.is_dir() else path.parent).stat().st_mode & 0o444
    for file in files:
        if not file.is_symlink():
            file.chmod(file.stat().st_mode | shared)


def replace_file(path: Path, content: bytes) -> None:
    """Write a file, which is as before or whole, even if this process is killed meanwhile."""
    partial = path.with_suffix(".tmp")
    partial.write_bytes(content)
    partial.replace(path)


def partial_name(path: Path) -> Path:
    return path.with_name(f"{path.name}{PARTIAL}{secrets.token_hex(4)}")


def delete_directory(path: Path) -> None:
    """Delete a directory atomically: no partial directory ever has its name."""
    doomed = path.rename(partial_name(path))
    shutil.rmtree(doomed, ignore_errors=True)


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def make_folder(path: Path) -> Path:
    """Make the output folder of a run, if there is none. Raises ConfigError if that fails."""
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(
            f"output: cannot make the folder {path} ({error.strerror}); choose another with output="
        ) from None
    return path
