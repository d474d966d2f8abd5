"""What an agent changed in its repository, found without git: no filter or hook of the agent's is
run."""

from __future__ import annotations

import difflib
import filecmp
import os
from pathlib import Path

LARGEST = 2**20  # bytes of a file whose lines `diff` shows
NOT_COMPARED = {".git", "__pycache__", ".pytest_cache"}


def changes(old: Path, new: Path) -> list[str]:
    """Names of the files that were added, changed or deleted."""
    before, after = files_of(old), files_of(new)
    same = {name for name in before.keys() & after.keys() if _same(before[name], after[name])}
    return sorted((before.keys() | after.keys()) - same)


def diff(old: Path, new: Path) -> str:
    """The changes as a unified diff; binary and large files by name."""
    parts = []
    for name in changes(old, new):
        before, after = _lines(old / name), _lines(new / name)
        if before is None or after is None:
            parts.append(f"Binary or large files a/{name} and b/{name} differ\n")
            continue
        lines = difflib.unified_diff(before, after, f"a/{name}", f"b/{name}")
        parts += [line if line.endswith("\n") else f"{line}\n" for line in lines]
    return "".join(parts)


def files_of(folder: Path) -> dict[str, Path]:
    """Files and links below a folder, by name."""
    found = {}
    for parent, folders, names in os.walk(folder):
        links = [name for name in folders if Path(parent, name).is_symlink()]
        folders[:] = [name for name in folders if name not in NOT_COMPARED]
        for name in (*names, *links):
            path = Path(parent, name)
            if path.is_symlink() or path.is_file():  # no pipes, which would block a reader
                found[str(path.relative_to(folder))] = path
    return found


def _same(one: Path, other: Path) -> bool:
    if one.is_symlink() or other.is_symlink():
        return one.is_symlink() and other.is_symlink() and one.readlink() == other.readlink()
    if one.stat().st_mode != other.stat().st_mode:
        return False
    return filecmp.cmp(one, other, shallow=False)


def _lines(file: Path) -> list[str] | None:
    """None for what is no text."""
    if file.is_symlink():
        return [f"-> {file.readlink()}\n"]
    if not file.is_file():
        return []
    if file.stat().st_size > LARGEST:
        return None
    try:
        return file.read_text(encoding="utf-8").splitlines(keepends=True)
    except UnicodeDecodeError:
        return None
