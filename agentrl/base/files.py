"""Output folders, and atomic files and directories: whole or as before, even if a process is killed
while it writes them."""

from __future__ import annotations

import fcntl
import glob
import os
import secrets
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from agentrl.errors import ConfigError

PARTIAL = ".tmp-"  # in the name of a directory that is being written or deleted


@contextmanager
def atomic_directory(path: Path) -> Iterator[Path]:
    """A new directory to write into. It becomes `path` on exit, and is deleted on an error; what a
    killed process has left of it, by the next one that writes `path`."""
    delete_partial(path)
    partial, descriptor = _locked_partial(path)
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
        os.close(descriptor)


def delete_partial(path: Path) -> None:
    """Delete the partial directories of `path` that no process is writing."""
    for partial in path.parent.glob(f"{glob.escape(path.name)}{PARTIAL}{'[0-9a-f]' * 8}"):
        with suppress(OSError):  # its writer lives, another process deletes it, or no locks here
            descriptor = os.open(partial, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(partial, ignore_errors=True)
            finally:
                os.close(descriptor)


def _locked_partial(path: Path) -> tuple[Path, int]:
    """A new directory, and a descriptor that holds its lock, which the kernel frees even if this
    process is killed: what `delete_partial` can lock has no writer."""
    while True:
        partial = partial_name(path)
        partial.mkdir(parents=True)
        descriptor = -1
        try:
            descriptor = os.open(partial, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            with suppress(OSError):  # a file system without locks, on which nothing is deleted
                fcntl.flock(descriptor, fcntl.LOCK_EX)
            if os.path.samestat(partial.stat(), os.fstat(descriptor)):
                return partial, descriptor
        except FileNotFoundError:  # another process deleted it before it was locked
            pass
        if descriptor >= 0:
            os.close(descriptor)


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
