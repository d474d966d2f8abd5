"""The cleaner: removes the workspaces of a dead runner, once the pipe that the runner holds open is
closed.

A small process imports this module: import only the standard library here.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import sys
import time
from pathlib import Path

# Seconds of retries, because processes that supervisors are ending may still write.
REMOVAL_PATIENCE = 30.0


def remove(folder: Path) -> None:
    """Delete a folder, regardless of permissions that an agent has set in it. Never raises."""
    shutil.rmtree(folder, ignore_errors=True)
    if folder.exists():
        for parent, folders, _ in os.walk(folder):
            for name in folders:
                if not os.path.islink(path := os.path.join(parent, name)):  # noqa: PTH114, PTH118
                    with contextlib.suppress(OSError):
                        os.chmod(path, 0o700)  # noqa: PTH101
        shutil.rmtree(folder, ignore_errors=True)


def main(folder: Path, lock: Path, pipe: int) -> None:
    while os.read(pipe, 1):
        pass
    until = time.monotonic() + REMOVAL_PATIENCE
    while folder.exists() and time.monotonic() < until:
        remove(folder)
        time.sleep(0.05)
        remove(folder)
    lock.unlink(missing_ok=True)


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3]))
