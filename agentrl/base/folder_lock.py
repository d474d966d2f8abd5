"""Locks of a run's output folder and of its checkpoints.

The front and the algorithm process of a run hold a shared lock while they live. Only a process with
an exclusive lock deletes files of the folder. Whoever reads a checkpoint holds a shared lock on its
folder, and a run deletes none that is being read.
"""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

from agentrl.errors import AgentRLError, ConfigError, TrainingError

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
            f"--fresh: the run in {output} is live (process {holder}) and would go on writing to "
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
    """Yields whether a folder may be deleted: it is there and nobody reads it, or begins to."""
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
