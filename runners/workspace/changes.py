"""Finds an agent's changes to its repository without git, as the agent may control git's hooks."""

from __future__ import annotations

import difflib
import filecmp
import io
import os
import shutil
import tarfile
from pathlib import Path

from agentrl.runners.workspace import cleaner
from agentrl.runners.workspace.base import WorkspaceError
from agentrl.runners.workspace.sources import no_space_or

LARGEST_DIFFED_FILE = 2**20  # bytes of a file of which `diff` shows lines
LARGEST_PACK = 4 * 2**20  # bytes of changed files that are stored until scoring
NOT_COMPARED = {".git", "__pycache__", ".pytest_cache"}


def changes(old: Path, new: Path) -> list[str]:
    """List the names of files that were added, changed or deleted."""
    before, after = files_of(old), files_of(new)
    same = {name for name in before.keys() & after.keys() if _same(before[name], after[name])}
    return sorted((before.keys() | after.keys()) - same)


def diff(old: Path, new: Path) -> str:
    """Return the changes as a unified diff; binary and large files only by name."""
    parts, found = [], (files_of(old), files_of(new))  # excludes names that lead through links
    for name in changes(old, new):
        before, after = (_lines(files.get(name)) for files in found)
        if before is None or after is None:
            parts.append(f"Binary or large files a/{name} and b/{name} differ\n")
            continue
        lines = difflib.unified_diff(before, after, f"a/{name}", f"b/{name}")
        parts += [line if line.endswith("\n") else f"{line}\n" for line in lines]
    return "".join(parts)


def carry_over(old: Path, new: Path, copy: Path) -> None:
    """Apply the changes from `old` to `new` to `copy`, a copy of `old`."""
    changed, after = changes(old, new), files_of(new)
    _delete(copy, changed)
    for name in changed:
        if name in after:
            (copy / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(after[name], copy / name, follow_symlinks=False)


def pack(old: Path, new: Path) -> bytes:
    """Pack the changes in an archive: the names of changed files, then those that still exist.
    Raises WorkspaceError if they cannot be read or are too large."""
    try:
        changed, after = changes(old, new), files_of(new)
        left = {name: after[name] for name in changed if name in after}
        if (size := sum(file.lstat().st_size for file in left.values())) > LARGEST_PACK:
            raise WorkspaceError(f"its changed files have {size} bytes, over {LARGEST_PACK}")
        buffer, names = io.BytesIO(), "\0".join(changed).encode(errors="surrogateescape")
        with tarfile.open(fileobj=buffer, mode="w:gz", compresslevel=1) as archive:
            head = tarfile.TarInfo("changed")
            head.size = len(names)
            archive.addfile(head, io.BytesIO(names))
            for name, file in left.items():
                archive.add(file, name, recursive=False)
        return buffer.getvalue()
    except OSError as error:
        raise no_space_or(error, "read") from None


def unpack(copy: Path, packed: bytes) -> None:
    """Apply the changes of `pack` to a copy of the original folder."""
    try:
        with tarfile.open(fileobj=io.BytesIO(packed)) as archive:
            head, *files = archive.getmembers()
            names = archive.extractfile(head)
            assert names is not None
            _delete(copy, names.read().decode(errors="surrogateescape").split("\0"))
            if hasattr(tarfile, "tar_filter"):
                archive.extractall(copy, files, filter="tar")
            else:  # Python before 3.11.4; names of `files_of` lead nowhere else
                archive.extractall(copy, files)
    except OSError as error:
        raise no_space_or(error, "copy") from None


def _delete(copy: Path, changed: list[str]) -> None:
    """Delete changed files, existing ones first: then no name leads through a link of the agent."""
    known = files_of(copy)
    for name in changed:
        if name in known:
            known[name].unlink()
    for name in changed:
        if (folder := copy / name).is_dir():  # a file has taken its place
            cleaner.remove(folder)


def files_of(folder: Path) -> dict[str, Path]:
    """Map names to paths of the files and links below a folder."""
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


def _lines(file: Path | None) -> list[str] | None:
    """Return the lines of a file, none if it does not exist; None if it is large or not text."""
    if file is None:
        return []
    if file.is_symlink():
        return [f"-> {file.readlink()}\n"]
    if file.stat().st_size > LARGEST_DIFFED_FILE:
        return None
    try:
        return file.read_text(encoding="utf-8").splitlines(keepends=True)
    except UnicodeDecodeError:
        return None
