"""Ends what a process has started and left behind. Linux only; elsewhere nothing is found.

A subreaper is the parent of all that its children leave behind, also of daemons, which have a
session of their own and whose parent has ended.
"""

from __future__ import annotations

import contextlib
import ctypes
import multiprocessing.resource_tracker
import os
import signal
import sys
import time
from collections.abc import Collection, Iterator
from pathlib import Path

PR_SET_CHILD_SUBREAPER = 36  # linux/prctl.h
PATIENCE, PAUSE = 5.0, 0.02  # seconds for processes to end, and between two looks


@contextlib.contextmanager
def ending_descendants() -> Iterator[list[int]]:
    """At the end, kill what was started meanwhile and still runs; yields a list that then has the
    ids of these processes. Only for a process that ends afterwards."""
    before, ended = set(_children()), list[int]()
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    try:
        yield ended
    finally:
        tracker = getattr(multiprocessing.resource_tracker._resource_tracker, "_pid", None)
        ended += _kill_all(before | {tracker})


def _kill_all(spared: Collection[int | None]) -> list[int]:
    """Kill until no child is left: the children of a killed one become children of this process."""
    killed, until = dict[int, None](), time.monotonic() + PATIENCE
    while time.monotonic() < until:
        left = [pid for pid in _children() if pid not in spared]
        if not left:
            break
        for pid in left:
            with contextlib.suppress(ProcessLookupError, ChildProcessError):
                done, _ = os.waitpid(pid, os.WNOHANG)
                if done == 0:
                    os.kill(pid, signal.SIGKILL)
                    killed[pid] = None
        time.sleep(PAUSE)
    return list(killed)


def _children() -> list[int]:
    me, found = str(os.getpid()), list[int]()
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):  # the process has ended
            if stat.read_text().rpartition(")")[2].split()[1] == me:
                found.append(int(stat.parent.name))
    return found
