"""The simulated disk: a folder in memory, of which a power cut keeps what was synced."""

from __future__ import annotations

import os
import shutil
import stat
from collections.abc import Iterator
from pathlib import Path


class Disk:
    """`lie`: from then on it keeps nothing, whatever it says; a power cut restores the state then,
    and half of each file of later checkpoints."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.snapshot = folder, folder.with_name(f"{folder.name}-kept")
        self.synced: set[int] = set()  # inodes
        self.names: dict[int, set[str]] = {}  # inode of a folder -> what it had at its last sync
        self.lies = False

    def sync(self, descriptor: int) -> None:
        if not self.lies:
            status = os.fstat(descriptor)
            self.synced.add(status.st_ino)
            if stat.S_ISDIR(status.st_mode):
                self.names[status.st_ino] = {*os.listdir(descriptor)}

    def lie(self) -> None:
        if not self.lies:
            shutil.copytree(self.folder, self.snapshot, symlinks=True, ignore=_shared_memory)
            self.lies = True

    def power_cut(self) -> None:
        """Call it while no process lives."""
        if self.lies:
            self._return()
        else:
            self._lose()
        for file in self.folder.glob("*-shm"):
            file.unlink()
        self.synced |= {file.stat().st_ino for file in self._checkpoints() if file.is_file()}
        for folder in self._folders():
            self.names[folder.stat().st_ino] = {path.name for path in folder.iterdir()}
        self.lies = False

    def _lose(self) -> None:
        """Lose half of each file that was not synced, and what is new in each folder."""
        for folder in [*self._folders()]:
            synced_names = self.names.get(folder.stat().st_ino, set()) if folder.exists() else set()
            for path in folder.iterdir() if folder.exists() else ():
                if path.name not in synced_names:
                    shutil.rmtree(path) if path.is_dir() else path.unlink()
        for file in self._checkpoints():
            if file.is_file() and file.stat().st_ino not in self.synced:
                halve(file)

    def _return(self) -> None:
        later = self.folder / "out" / "checkpoints"
        saved = self.snapshot / "out" / "checkpoints"
        for path in sorted(later.glob("*")) if later.is_dir() else ():
            if not (saved / path.name).exists():
                for file in path.rglob("*"):
                    if file.is_file():
                        halve(file)
                saved.mkdir(exist_ok=True, parents=True)
                if path.is_dir() and not path.is_symlink():
                    shutil.copytree(path, saved / path.name)
        for path in self.folder.iterdir():
            shutil.rmtree(path) if path.is_dir() else path.unlink()
        for path in self.snapshot.iterdir():
            path.rename(self.folder / path.name)
        self.snapshot.rmdir()

    def _folders(self) -> Iterator[Path]:
        top = self.folder / "out" / "checkpoints"
        if top.is_dir():
            yield top
            yield from (path for path in top.rglob("*") if path.is_dir() and not path.is_symlink())

    def _checkpoints(self) -> Iterator[Path]:
        yield from (self.folder / "out").rglob("*")


def _shared_memory(folder: str, names: list[str]) -> list[str]:
    return [name for name in names if name.endswith("-shm")]


def halve(file: Path) -> None:
    with file.open("rb+") as opened:
        opened.truncate(file.stat().st_size // 2)
