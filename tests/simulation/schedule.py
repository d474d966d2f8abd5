"""Schedules: the shape of a run, and the faults that happen in it, in order."""

from __future__ import annotations

import random
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tests.simulation.loop import Process
    from tests.simulation.world import World

ENOUGH = 20  # faults with an effect, after which no more happen
FAULTS = 48  # drawn faults, of which some find no target; if too few had an effect, kills follow
GAP, PAUSES = 150, 0.25  # callbacks between two bursts of faults, at most; share of faults
BURST = 20  # callbacks between two faults of a burst, at most
HTTP = 1.6  # factor of GAP if processes reach the store through a server
STEPS = (1, 1, 2, 2, 3)  # of a run: most callbacks of a long one come after its last fault
STORE = "store"  # name of the store's server


@dataclass(frozen=True)
class Shape:
    """What is run. `http`: its processes reach the store through a server. `live`: sessions of
    users are recorded and trained, in place of all others. `retried`: the database aborts
    transactions, which are then run again, as PostgreSQL does: see test_postgres_model.py. `large`:
    a checkpoint is written while the next step is trained, as one of some gigabytes is. `deaf`:
    processes cannot notify each other, and poll. `keep`: checkpoints. `empty`: step whose agents
    all fail, so that it trains nothing."""

    steps: int = 3
    groups: int = 2
    size: int = 2
    runners: int = 2
    staleness: float = 0.0
    http: bool = False
    live: bool = False
    retried: bool = False
    administrator: bool = False
    large: bool = False
    deaf: bool = False
    keep: int = 8
    empty: int | None = None

    @property
    def names(self) -> list[str]:
        """Its processes."""
        if self.live:
            return ["learner", "gateway"]
        runners = [f"runner-{n}" for n in range(self.runners)]
        others = [*([STORE] if self.http else []), *(["administrator"] * self.administrator)]
        return ["algorithm", *runners, *others]

    @property
    def writers(self) -> list[str]:
        """Those that commit."""
        return [STORE] if self.http else self.names


@dataclass(frozen=True)
class Fault:
    """`gap`: callbacks that run until the next one. `when`: not at once, but before or after the
    next commit of `target`, or when it next syncs a file."""

    kind: str
    target: str = ""
    amount: float = 0.0
    gap: int = 100
    when: str = ""

    def happen(self, world: World) -> None:
        if self.when:
            world.armed.setdefault(self.target, []).append(self)
            return
        process = world.alive(self.target) if self.target else None
        if self.target and process is None:
            return
        if self.kind == "rot":  # waits for a checkpoint, even if enough faults had an effect
            world.rotting.append(self)
            return
        if self.kind not in WORDS:  # these have an effect once they meet a message
            world.had_effect(self)
        if process is not None:
            self._to(world, process)
        elif self.kind == "clock":
            world.say(f"! the clock is set by {self.amount:+.0f} s")
            world.system.jumped += self.amount
            world.system.lost_time += max(0.0, self.amount)
        elif self.kind == "lie":
            world.say("! from here on the disk does not keep what it says it has synced")
            world.disk.lie()
        elif self.kind == "power":
            world.say("! power cut")
            world.power_cut()
        elif self.kind in WORDS:
            world.say(f"! {WORDS[self.kind].format(int(self.amount))}")
            world.lost[self.kind] += [self] * int(self.amount)

    def _to(self, world: World, process: Process) -> None:
        if self.kind == "kill":
            world.say(f"! {process} is killed")
            world.kill(process)
        elif self.kind == "pause":
            world.say(f"! {process} is suspended for {self.amount:g} s")
            world.system.lost_time += self.amount
            world.loop.freeze(process, self.amount)
        elif self.kind == "away":
            world.say(f"! {process} is killed, and away for {self.amount:g} s")
            world.kill(process, self.amount)
        elif self.kind == "stop":
            world.say(f"! {process} is told to end, and does after {self.amount:g} s")
            world.stop_server(process, self.amount)
        elif self.kind == "second":
            world.say(f"! {process} is suspended for {self.amount:g} s, and a second one starts")
            world.loop.freeze(process, self.amount)
            world.start(process.name)

    def interrupt(self, world: World, process: Process) -> None:
        """At the commit or sync for which it waited."""
        world.had_effect(self)
        if self.kind == "kill":
            world.say(f"! {process} is killed at a {self.when}")
            world.kill(process)
            world.loop.hub.switch()  # never returns
        elif self.kind == "pause":
            world.say(f"! {process} is suspended for {self.amount:g} s at a {self.when}")
            world.loop.freeze(process, self.amount)
            world.yield_thread()
        elif self.kind == "abort":
            world.say(f"! a transaction of {process} is aborted at a {self.when}")
            raise world.system.aborted()
        elif self.kind == "full":
            world.say(f"! the disk is full for {process}")
            if self.when == "sync":
                raise OSError(28, "No space left on device")
            raise world.system.sqlite_error("SQLITE_FULL", "database or disk is full")


WORDS = {
    "notification": "the next {} notifications of commits are lost",
    "request": "the next {} requests are lost",
    "response": "the next {} responses are lost",
    "late": "the next {} requests come late, after they were repeated",
    "twice": "the next {} requests come twice",
    "silence": "the next {} responses never come, and no connection breaks",
}
COMMON = ("kill", "kill", "kill at", "kill at", "pause", "pause at", "clock", "second", "lie",
          "power", "abort", "full", "full sync", "kill sync", "request", "response",
          "rot")  # fmt: skip
LIVE = ("kill", "kill at", "pause", "pause at", "clock", "notification", "response", "request")
LOCAL, REMOTE = ("notification", "notification"), (
    "late", "twice", "away", "stop", "silence", "request", "response",
)  # fmt: skip


def undisturbed(seed: int, shape: Shape) -> Schedule:
    return Schedule(seed, shape)


@dataclass(frozen=True)
class Schedule:
    """`first`: callbacks until the first fault. `at_least`: faults with an effect; if `faults` has
    fewer, processes are killed until there were so many."""

    seed: int
    shape: Shape = Shape()
    faults: tuple[Fault, ...] = ()
    first: int = 100
    at_least: int = 0


def drawn(seed: int) -> Schedule:
    """The schedule of a seed."""
    draw = random.Random(f"schedule {seed}")
    shape = Shape(
        staleness=draw.choice((0.0, 0.0, 1.0)), http=draw.random() < 0.25,
        runners=draw.choice((1, 2, 2)),
        retried=draw.random() < 0.3, administrator=draw.random() < 0.25,
    )  # fmt: skip
    if draw.random() < 0.2:
        shape = replace(shape, large=True)
    shape = replace(
        shape, deaf=draw.random() < 0.1, keep=draw.choice((8, 8, 1, 2)),
        empty=draw.choice((None, None, None, 1, 2)),
    )  # fmt: skip
    if (steps := draw.choice(STEPS)) < shape.steps:
        empty = None if shape.empty is None or steps == 1 else 1
        shape = replace(shape, steps=steps, groups=draw.choice((1, 1, 2)), empty=empty)
    if draw.random() < 0.15:
        shape = Shape(live=True)
    longest = int(GAP * (HTTP if shape.http else 1.0))
    usual = LIVE if shape.live else (*COMMON, *(REMOTE if shape.http else LOCAL))
    usual += ("abort",) * 8 if shape.retried else ()
    kinds = draw.sample(usual, min(len(usual), 8))  # a schedule has few kinds, each often
    faults = [drawn_fault(draw, shape, draw.choice(kinds), longest) for _ in range(FAULTS)]
    return Schedule(seed, shape, tuple(faults), 1 + draw.randrange(longest), ENOUGH)


def drawn_gap(draw: random.Random, longest: int) -> int:
    """Faults come in bursts, between which a run goes on: else all would hit its first step."""
    return 1 + draw.randrange(longest if draw.random() < PAUSES else BURST)


def drawn_fault(draw: random.Random, shape: Shape, kind: str, longest: int) -> Fault:
    gap, target = drawn_gap(draw, longest), draw.choice(shape.names)
    writer, when = draw.choice(shape.writers), draw.choice(("before", "after"))
    seconds = draw.choice((0.5, 3.0, 12.0, 40.0))
    if kind == "kill at":
        return Fault("kill", writer, 0.0, gap, when)
    if kind == "pause at":
        return Fault("pause", writer, draw.choice((0.2, 6.0)), gap, when)
    if kind == "abort":
        return Fault(kind, writer, 0.0, gap, draw.choice(("before", "statement")))
    if kind == "full":
        return Fault(kind, writer, 0.0, gap, "before")
    if kind.endswith(" sync"):
        return Fault(kind.removesuffix(" sync"), "algorithm", 0.0, gap, "sync")
    if kind == "second":
        return Fault(kind, "algorithm", seconds, gap)
    if kind in ("away", "stop"):
        return Fault(kind, STORE, seconds if kind == "away" else 1.0, gap)
    if kind in ("kill", "pause"):
        return Fault(kind, target, seconds, gap)
    if kind == "clock":
        return Fault(kind, "", draw.choice((-3600.0, -20.0, 20.0, 3600.0)), gap)
    if kind in ("lie", "power", "rot"):
        return Fault(kind, "", 0.0, gap)
    return Fault(kind, "", draw.randint(1, 6), gap)
