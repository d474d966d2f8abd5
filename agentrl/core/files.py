"""Output folders: atomic files and directories, locks, and progress lines on the console.

A write is complete or has no effect, even if a process is killed while it writes. The launcher and
the algorithm process of a run hold a shared lock on its folder while they live, and only a process
with an exclusive lock deletes files of the folder. A process that reads a checkpoint holds a shared
lock on its folder, and a run never deletes one that is being read.
"""

from __future__ import annotations

import fcntl
import glob
import logging
import os
import secrets
import shutil
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from agentrl.core.errors import AgentRLError, ConfigError, TrainingError
from agentrl.core.processes import log_phase

PARTIAL = ".tmp-"  # in the name of a directory that is being written or deleted


@contextmanager
def atomic_directory(path: Path) -> Iterator[Path]:
    """A new directory to write into. It becomes `path` on exit and is deleted on an error. The
    leftover of a killed process is deleted by the next one that writes `path`."""
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
        # Exists only after an error, otherwise it was renamed.
        shutil.rmtree(partial, ignore_errors=True)
        os.close(descriptor)


def delete_partial(path: Path) -> None:
    """Delete the partial directories of `path` that no process is writing."""
    for partial in path.parent.glob(f"{glob.escape(path.name)}{PARTIAL}{'[0-9a-f]' * 8}"):
        # Its writer runs, another process deletes it, or the file system has no locks.
        with suppress(OSError):
            descriptor = os.open(partial, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(partial, ignore_errors=True)
            finally:
                os.close(descriptor)


def _locked_partial(path: Path) -> tuple[Path, int]:
    """A new directory, and a descriptor that holds its lock. The kernel releases the lock even if
    this process is killed, so a directory that `delete_partial` can lock has no writer."""
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
    """Give the weights in a folder, or in this file, the read permissions of the folder:
    safetensors makes its files readable only by their owner, so a container could not serve
    them."""
    files = path.rglob("*.safetensors") if path.is_dir() else (path,)
    shared = (path if path.is_dir() else path.parent).stat().st_mode & 0o444
    for file in files:
        if not file.is_symlink():
            file.chmod(file.stat().st_mode | shared)


def replace_file(path: Path, content: bytes) -> None:
    """Write a file atomically: it is unchanged or complete, even if this process is killed
    meanwhile."""
    partial = path.with_suffix(".tmp")
    partial.write_bytes(content)
    partial.replace(path)


def partial_name(path: Path) -> Path:
    return path.with_name(f"{path.name}{PARTIAL}{secrets.token_hex(4)}")


def delete_directory(path: Path) -> None:
    """Delete a directory atomically: no partial directory ever has its name."""
    renamed = path.rename(partial_name(path))
    shutil.rmtree(renamed, ignore_errors=True)


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


FILE = "run.lock"


@dataclass(frozen=True, slots=True)
class FolderLock:
    path: Path
    descriptor: int

    def present(self) -> bool:
        """Whether the open file is still the one at its path, by its inode number."""
        try:
            return os.path.samestat(self.path.stat(), os.fstat(self.descriptor))
        except OSError:
            return False

    def check(self) -> None:
        """Raises TrainingError if the folder is no longer at its path."""
        if not self.present():
            raise TrainingError(
                f"{self.path.parent}: the folder was deleted, moved or replaced during its run, "
                "which ends here; if the folder still exists, resume the run from its new path"
            )


@contextmanager
def shared(output: Path) -> Iterator[FolderLock]:
    """Hold the shared lock of a folder. Waits for a process that is clearing the folder.

    If the block raises and the folder is gone, raises TrainingError instead."""
    output.mkdir(parents=True, exist_ok=True)
    with _locked(output, fcntl.LOCK_SH) as lock:
        os.pwrite(lock.descriptor, f"{os.getpid()}\n".encode(), 0)  # for messages of `exclusive`
        try:
            yield lock
        except (OSError, AgentRLError):
            lock.check()
            raise


@contextmanager
def exclusive(output: Path) -> Iterator[None]:
    """Hold the exclusive lock. Raises ConfigError if another process holds one."""
    try:
        with _locked(output, fcntl.LOCK_EX | fcntl.LOCK_NB):
            yield
    except BlockingIOError:
        holder = (output / FILE).read_text().partition("\n")[0] or "unknown"
        raise ConfigError(
            f"--fresh: the run in {output} is live (process {holder}) and would keep writing to "
            "deleted files; stop it first, or choose another name"
        ) from None


@contextmanager
def _locked(output: Path, kind: int) -> Iterator[FolderLock]:
    path = output / FILE
    while True:
        lock = FolderLock(path, os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600))
        try:
            fcntl.flock(lock.descriptor, kind)
            if lock.present():  # else another process deleted the folder during the wait
                yield lock
                return
        finally:
            os.close(lock.descriptor)


@contextmanager
def reading(*folders: Path) -> Iterator[None]:
    """Keep checkpoints from being pruned while they are read. Raises ConfigError if one is gone."""
    with ExitStack() as stack:
        for folder in folders:
            try:
                held = stack.enter_context(_flocked(folder.resolve(), fcntl.LOCK_SH))
            except OSError:
                held = False
            if not held:
                raise ConfigError(
                    f"{folder}: the run has deleted this checkpoint in the meantime; repeat the"
                    " command, or raise keep_checkpoints"
                )
        yield


@contextmanager
def deleting(folder: Path) -> Iterator[bool]:
    """Yields whether a folder may be deleted: it exists, and no process reads it; while the context
    is open, none can begin to."""
    try:
        with _flocked(folder.resolve(), fcntl.LOCK_EX | fcntl.LOCK_NB) as held:
            yield held
    except (BlockingIOError, FileNotFoundError):
        yield False


@contextmanager
def _flocked(folder: Path, kind: int) -> Iterator[bool]:
    """Hold a lock on a folder itself. Yields whether the folder is still at its path."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        fcntl.flock(descriptor, kind)
        yield FolderLock(folder, descriptor).present()
    finally:
        os.close(descriptor)


INTERVAL = 5.0  # seconds between lines
_reported = [0.0]  # when `steps_left` last reported progress, so that `still_at` need not


def steps_left(
    log: logging.Logger, what: str, total: int, *, clock: Callable[[], float] = time.monotonic
) -> Callable[[int], None]:
    """A function that is called with the number of steps done so far. Every INTERVAL seconds it
    logs their share and an estimate of the seconds left."""
    started = last = clock()

    def report(done: int) -> None:
        nonlocal last
        now = clock()
        if now - last < INTERVAL or not 0 < done < total:
            return
        last = now
        _reported[0] = time.monotonic()
        left = (now - started) / done * (total - done)
        log_phase(log, f"{what}: {done / total:.0%} done, about {left:.0f} s left")

    return report


@contextmanager
def still_at(log: logging.Logger, what: str, interval: float = 2 * INTERVAL) -> Iterator[None]:
    """Log that work of unknown length continues, every `interval` seconds."""
    ended, started = threading.Event(), time.monotonic()

    def report() -> None:
        while not ended.wait(interval):
            now = time.monotonic()
            if now - _reported[0] > interval:
                log_phase(log, f"{what}: {now - started:.0f} s so far")

    reporter = threading.Thread(target=report, name="progress", daemon=True)
    reporter.start()
    try:
        yield
    finally:
        ended.set()
        reporter.join()


def duration_text(seconds: float) -> str:
    """A duration in the largest unit of which it has at least two."""
    units = {"days": 86_400, "h": 3600, "min": 60}
    unit = next((name for name, size in units.items() if seconds >= 2 * size), "s")
    return f"{seconds / units.get(unit, 1):.0f} {unit}"
