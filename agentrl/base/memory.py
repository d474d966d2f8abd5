"""The memory of this machine or container: its size, what is free, and processes killed for lack
of it. On other kernels than Linux only the size is known."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

ROOT = Path("/sys/fs/cgroup")
PROC = Path("/proc")
# Files of a control group, in version 2 and 1 of the kernel's interface.
LIMITS = ("memory.max", "memory.limit_in_bytes")
EVENTS = ("memory.events", "memory.oom_control")
OCCUPIED = ("anon", "total_rss")  # keys of memory.stat: what cannot be dropped like a file's cache


def total() -> int:
    """Bytes of memory that this process and its children may have."""
    machine = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return min([machine, *(limit for _, limit in _limits())])


def free() -> int:
    """Bytes that can be had without taking them from another process."""
    found = [total()]
    if (machine := _numbers(PROC / "meminfo").get("MemAvailable:")) is not None:
        found.append(1024 * machine)
    for group, limit in _limits():
        stat = _numbers(group / "memory.stat")
        found.append(limit - next((stat[key] for key in OCCUPIED if key in stat), 0))
    return max(0, min(found))


def kills() -> int | None:
    """The number of processes of this container, or else of this machine, that the kernel has
    killed because memory ran out; it counts before it kills. None: not known."""
    for group in _groups():
        for name in EVENTS:
            if (count := _numbers(group / name).get("oom_kill")) is not None:
                return count
    return _numbers(PROC / "vmstat").get("oom_kill")


def _limits() -> Iterator[tuple[Path, int]]:
    """The groups with a limit of memory, and the limit."""
    for group in _groups():
        for name in LIMITS:
            with suppress(OSError, ValueError):  # no such file, or "max"
                yield group, int((group / name).read_text())


def _groups() -> Iterator[Path]:
    """The control groups of this process that may limit its memory, from the innermost one."""
    with suppress(OSError):
        for line in (PROC / "self" / "cgroup").read_text().splitlines():
            _, controllers, path = line.split(":", 2)
            if controllers and "memory" not in controllers.split(","):
                continue
            root = ROOT / "memory" if controllers else ROOT
            own = root / path.lstrip("/")
            yield from (one for one in (own, *own.parents) if one.is_relative_to(root))


def _numbers(file: Path) -> dict[str, int]:
    """The numbers in a file of lines such as "name 12"; none if it cannot be read."""
    found = {}
    with suppress(OSError):
        for words in map(str.split, file.read_text().splitlines()):
            if len(words) > 1 and words[1].isdecimal():
                found[words[0]] = int(words[1])
    return found
