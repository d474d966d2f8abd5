"""SHA-256 digests of a directory's files, which reveal damage before anything is loaded.

The digest file has the format of `sha256sum`, so `sha256sum -c SHA256SUMS` checks a copy of a
checkpoint without this package.
"""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from agentrl.core.errors import DamagedError

FILE = "SHA256SUMS"
LINE = re.compile(r"([0-9a-f]{64})  (.+)")
THREADS = min(8, os.cpu_count() or 1)  # threads help, because hashing releases the GIL


def write(directory: Path) -> None:
    """Write the digests of all files of a directory, once they are complete."""
    files = sorted(path for path in directory.rglob("*") if path.is_file() and path.name != FILE)
    lines = [
        f"{digest}  {file.relative_to(directory).as_posix()}\n"
        for file, digest in _digests(files).items()
    ]
    (directory / FILE).write_text("".join(lines), encoding="utf-8")


def check(directory: Path) -> None:
    """Raises DamagedError if a file below a directory is missing or has changed since it was
    written.

    `directory` may also be a part of the directory that has the digests. Directories without
    digests, from other programs or earlier versions, pass."""
    root = next(
        (folder for folder in (directory, directory.parent) if (folder / FILE).is_file()), None
    )
    if root is None:
        return
    expected = {file: digest for file, digest in _read(root) if file.is_relative_to(directory)}
    missing = [file for file in expected if not file.is_file()]
    damaged = missing or [
        file for file, actual in _digests(expected).items() if actual != expected[file]
    ]
    if damaged:
        names = ", ".join(str(file.relative_to(root)) for file in damaged)
        raise DamagedError(
            f"checkpoint {directory}: {names} {'is missing' if missing else 'is damaged'}, by the "
            f"digests in {FILE}; restore a copy, or use another checkpoint"
        )


def _read(root: Path) -> Iterator[tuple[Path, str]]:
    text = (root / FILE).read_text(encoding="utf-8", errors="replace")
    for line in text.removesuffix("\n").split("\n"):
        match = LINE.fullmatch(line)
        if match is None or not text.endswith("\n"):
            raise DamagedError(
                f"checkpoint {root}: {FILE} is damaged; restore a copy, or use another checkpoint"
            )
        yield root / match[2], match[1]


def _digests(files: Iterable[Path]) -> dict[Path, str]:
    with ThreadPoolExecutor(THREADS) as threads:
        return dict(zip(files, threads.map(_digest, files), strict=True))


def _digest(path: Path) -> str:
    try:
        with path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as error:  # the disk cannot read the file
        return f"unreadable: {error.strerror}"
