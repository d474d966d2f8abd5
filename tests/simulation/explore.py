"""Runs many schedules, and shrinks one that violates an invariant until a reader can follow it."""

from __future__ import annotations

import gc
import multiprocessing
import os
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from itertools import islice
from pathlib import Path

import msgspec

from tests.simulation.schedule import Fault, Schedule, Shape, drawn, undisturbed
from tests.simulation.system import harmless
from tests.simulation.world import World, simulate

COLLECT = 1000  # schedules after which the garbage of their processes is collected
MAX_LINES = 30  # of a schedule that is shown


@dataclass
class Result:
    """The result of one schedule."""

    seed: int
    violation: str = ""
    kinds: Counter[str] = field(default_factory=Counter)
    log: list[str] = field(default_factory=list)

    @property
    def faults(self) -> int:
        return sum(self.kinds.values())


@cache
def warm_up(http: bool) -> None:
    """Load what is loaded at its first use, so that its events belong to no schedule."""
    simulate(undisturbed(0, Shape(http=http)))


def run(schedule: Schedule) -> Result:
    warm_up(schedule.shape.http)
    world = simulate(schedule)
    why = "" if world.violation is None else str(world.violation)
    kinds = Counter(fault.kind for fault in world.effective.values())
    return Result(schedule.seed, why, kinds, world.log if why else [])


def run_seed(seed: int) -> Result:
    gc.disable()
    result = run(drawn(seed))
    if seed % COLLECT == 0:
        with harmless():
            gc.collect()
    return result


def explore(seeds: Sequence[int], processes: int = 2) -> Iterator[Result]:
    """Run the schedules of seeds, in any order."""
    os.environ["OMP_NUM_THREADS"] = "1"
    for http in (False, True):  # before the fork, so that the processes share what this loads
        warm_up(http)
    sys.unraisablehook = lambda *arguments: None  # for killed objects, when this process ends
    gc.collect()
    gc.freeze()  # imported objects are not scanned after every schedule
    if processes == 1:
        yield from map(run_seed, seeds)
        return
    context = multiprocessing.get_context("fork")
    with context.Pool(processes, maxtasksperchild=20) as pool:
        yield from pool.imap_unordered(run_seed, seeds, chunksize=10)


def shrink(schedule: Schedule, patience: int = 200) -> Schedule:
    """Remove faults while the schedule still violates an invariant."""
    parts, left = 2, patience
    while len(schedule.faults) > 1 and left > 0:
        size = -(-len(schedule.faults) // parts)
        for first in range(0, len(schedule.faults), size):
            left -= 1
            fewer = without(schedule, range(first, min(first + size, len(schedule.faults))))
            if run(fewer).violation:
                schedule, parts = fewer, max(2, parts - 1)
                break
        else:
            if size == 1:
                break
            parts = min(len(schedule.faults), 2 * parts)
    return schedule


def without(schedule: Schedule, places: range) -> Schedule:
    """The schedule without some faults, and without kills in their place; the others happen after
    as many callbacks as before."""
    first, faults = schedule.first, list[Fault]()
    for place, fault in enumerate(schedule.faults):
        if place not in places:
            faults.append(fault)
        elif faults:
            faults[-1] = replace(faults[-1], gap=faults[-1].gap + fault.gap)
        else:
            first += fault.gap
    return replace(schedule, first=first, faults=tuple(faults), at_least=0)


def described(schedule: Schedule, result: Result) -> str:
    """A schedule in words, at most MAX_LINES."""
    shape = schedule.shape
    head = [f"seed {schedule.seed}: {result.violation}", f"  {shape}"]
    lines = [f"  {line}" for line in result.log]
    most = MAX_LINES - len(head)
    if len(lines) > most:
        shown = {n for n, line in enumerate(lines) if "! " in line} | {len(lines) - 1}
        others = (n for n in reversed(range(len(lines))) if n not in shown)
        shown |= {*islice(others, max(0, most - len(shown)))}
        lines = [lines[n] for n in sorted(shown)][-most:]
    return "\n".join([*head, *lines])


def save(schedule: Schedule, path: Path) -> None:
    """Write a schedule, one line for each fault."""
    fields = msgspec.to_builtins(schedule)
    faults = fields.pop("faults")
    path.write_bytes(b"\n".join(map(msgspec.json.encode, (fields, *faults))) + b"\n")


def load(path: Path) -> Schedule:
    head, *faults = map(msgspec.json.decode, path.read_bytes().splitlines())
    return msgspec.convert(head | {"faults": faults}, Schedule)


__all__ = ["Result", "World", "described", "explore", "load", "run", "save", "shrink"]
