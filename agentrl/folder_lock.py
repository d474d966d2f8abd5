"""Who works in the output folder of a run: a file that every process of the run's side holds open.

Always true: who trains or attends a run holds the file's lock, shared, for as long as it lives,
whatever kills it; only who has it alone deletes what is in the folder.
"""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from agentrl.errors import AgentRLError, ConfigError, TrainingError

FILE = "run.lock"


@dataclass(frozen=True, slots=True)
class FolderLock:
    path: Path
    descriptor: int

    def present(self) -> bool:
        """Whether the file is still the one at its path. While it is open, no other has its
        number."""
        try:
            return os.path.samestat(self.path.stat(), os.fstat(self.descriptor))
        except OSError:
            return False

    def check(self) -> None:
        """Raises TrainingError once the folder is not where it was."""
        if not self.present():
            raise TrainingError(
                f"{self.path.parent}: the folder was deleted, moved or replaced while its run was "
                "live; the run ends here, and goes on from where the folder is now, if it is"
            )


@contextmanager
def shared(output: Path) -> Iterator[FolderLock]:
    """Work in a folder, beside others of the same run. Waits for who is clearing it.

    Whatever ends the work, if the folder is gone by then, that is what is raised."""
    output.mkdir(parents=True, exist_ok=True)
    with _locked(output, fcntl.LOCK_SH) as lock:
        os.pwrite(lock.descriptor, f"{os.getpid()}\n".encode(), 0)  # for `alone` to name
        try:
            yield lock
        except (OSError, AgentRLError):
            lock.check()
            raise


@contextmanager
def exclusive(output: Path) -> Iterator[None]:
    """Raises ConfigError while anybody else works in the folder."""
    try:
        with _locked(output, fcntl.LOCK_EX | fcntl.LOCK_NB):
            yield
    except BlockingIOError:
        holder = (output / FILE).read_text().partition("\n")[0] or "unknown"
        raise ConfigError(
            f"--fresh: the run in {output} is live (process {holder}), and would train on into "
            "deleted files; stop it first, or choose another name"
        ) from None


@contextmanager
def _locked(output: Path, kind: int) -> Iterator[FolderLock]:
    path = output / FILE
    while True:
        lock = FolderLock(path, os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600))
        try:
            fcntl.flock(lock.descriptor, kind)
            if lock.present():  # else the folder went as it was waited for
                yield lock
                return
        finally:
            os.close(lock.descriptor)
