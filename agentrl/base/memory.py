"""The memory of this machine or container: its size, what is free, and processes killed for lack
of it. On other kernels than Linux only the size is known."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections import deque
from collections.abc import Iterator
from contextlib import suppress
from functools import cache
from pathlib import Path

ROOT = Path("/sys/fs/cgroup")
PROC = Path("/proc")
# Files of a control group, in version 2 and 1 of the kernel's interface.
LIMITS = ("memory.max", "memory.limit_in_bytes")
EVENTS = ("memory.events", "memory.oom_control")
OCCUPIED = ("anon", "total_rss")  # keys of memory.stat: what cannot be dropped like a file's cache

CURE = (
    "set what is smaller of learner.token_budget, engine.max_batch and engine.max_context, or "
    "learner.gradient_checkpointing=true, policy.dtype=bfloat16 or policy.lora.rank=16"
)
FEWER = "lower runner.processes or runner.concurrency, so that fewer agents run at once"
LATELY = 10  # seconds from a kill by the kernel to the end of a large process, at most


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


def resident() -> int:
    """Bytes of this process that are in memory, files it has mapped included; 0: not known."""
    try:
        pages = int((PROC / "self/statm").read_bytes().split()[1])
    except OSError:
        return 0
    return pages * os.sysconf("SC_PAGE_SIZE")


def kills() -> int | None:
    """A number that grows when the kernel kills a process of this container or machine because
    memory ran out; it counts before it kills. None: not known."""
    files = [group / name for group in _groups() for name in EVENTS]
    found = [_numbers(file).get("oom_kill") for file in (*files, PROC / "vmstat")]
    counts = [count for count in found if count is not None]
    return sum(counts) if counts else None


class KillWatch:
    """Reads `kills` every second. Its thread is the only one that writes."""

    def __init__(self) -> None:
        self.counts = deque([kills()], maxlen=LATELY)
        threading.Thread(target=self._read, name="memory", daemon=True).start()

    def _read(self) -> None:
        while True:
            time.sleep(1.0)
            self.counts.append(kills())

    def killed_lately(self) -> bool | None:
        """Whether the kernel has killed a process for memory in the last seconds. None: unknown."""
        before, now = self.counts[0], kills()
        return None if before is None or now is None else now > before


@cache
def watch() -> KillWatch:
    """The watch of this process, which starts at the first call: before a child can be killed."""
    return KillWatch()


def cause_of(status: int) -> str:
    """Why a child with this exit status may have ended: "" unless memory has to do with it, or
    nobody knows whether it has. status: minus the number of a signal that ended it."""
    lately = watch().killed_lately() if status == -signal.SIGKILL else False
    if lately is None:
        return "perhaps because memory ran out"
    return "because memory ran out" if lately else ""


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
