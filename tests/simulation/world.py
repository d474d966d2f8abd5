"""One simulated run: its system, its network, its processes, and what goes wrong."""

from __future__ import annotations

import atexit
import contextvars
import gc
import json
import logging
import random
import shutil
import sqlite3
import sys
import tempfile
import warnings
from collections import Counter, defaultdict
from functools import cache
from pathlib import Path
from typing import Any
from unittest.mock import patch

import greenlet
import torch
from msgspec.structs import replace

from agentrl.algorithms.train import loop as training_loop
from agentrl.algorithms.train import saving
from agentrl.algorithms.train.checkpoint import STATE, earlier_checkpoints
from agentrl.core.config import RunConfig, resolve
from agentrl.core.errors import AgentRLError, Fenced, Unavailable
from agentrl.core.types import RunState
from agentrl.runners.gateway import server
from agentrl.store.sqlite import Location, prepare
from tests.simulation import actors, live
from tests.simulation import loop as sim
from tests.simulation.administrator import administrator
from tests.simulation.disk import Disk
from tests.simulation.invariants import LEASE, SLOTS, Invariants, Violation
from tests.simulation.loop import LANE, Lane, Process, SimulatedLoop, Stuck
from tests.simulation.network import Network
from tests.simulation.schedule import BURST, ENOUGH, STORE, Fault, Schedule, Shape
from tests.simulation.system import System, installed

NAME = "run"
LONGEST = 3000.0  # virtual seconds of a run
MAX_EVENTS = 60_000
RESTART = 0.5  # seconds until a process that has ended is started again


class World:
    def __init__(self, schedule: Schedule, folder: Path) -> None:
        self.schedule, self.folder, self.disk = schedule, folder, Disk(folder)
        self.loop = SimulatedLoop(schedule.seed)
        self.system = System(self.loop)
        self.network = Network(self)
        self.log: list[str] = []
        self.effective: dict[int, Fault] = {}  # faults that had an effect
        self.serial = 0
        self.delivered: set[str] = set()  # attempts that workers received
        self.of_former_owners: set[int] = set()  # answers of servers whose run another one owns
        self.heard: dict[str, list[str]] = {}  # live session -> answers that its user read
        self.damaged: set[str] = set()  # checkpoints, as the store names them
        self.only_whole: str | None = None  # checkpoint without an undamaged earlier one
        self.cut: dict[str, str] = {}  # live session -> what was read of the answer that it cut off
        self.users_left = live.SESSIONS
        self.started: Counter[str] = Counter()
        self.lost: defaultdict[str, list[Fault]] = defaultdict(list)  # one entry for each message
        self.armed: dict[str, list[Fault]] = {}
        self.rotting: list[Fault] = []  # each damages a checkpoint
        self.violation: Violation | None = None
        self.finished = False
        self.tasks = [{"id": str(n), "input": f"task {n}"} for n in range(8)]
        self.heldout: list[Any] = []
        self.config = self._config()
        self.invariants = Invariants(self)

    def _config(self) -> RunConfig:
        shape, folder = self.schedule.shape, str(self.folder)
        store = f"http://{actors.KEYS['admin']}@store" if shape.http else self.file
        return replace(settings(shape), root=folder, output=f"{folder}/out", store=store)

    @property
    def file(self) -> str:
        """URL of the store's file."""
        return f"sqlite:///{self.folder}/store.db"

    # -- running -----------------------------------------------------------------------------------

    def run(self) -> World:
        random.seed(self.schedule.seed)
        torch.manual_seed(self.schedule.seed)
        self.system.at_commit = self.at_commit
        self.system.sync = self.at_sync
        self.system.statement = self.at_statement
        self.system.retries = self.schedule.shape.retried
        self.system.deaf = self.schedule.shape.deaf
        self.system.is_lost = self.is_lost
        self.loop.on_event = self.next_fault
        self.loop.next_event = self.schedule.first
        self._faults = list(self.schedule.faults)
        empty = template()
        disabled, unraisable = logging.root.manager.disable, sys.unraisablehook
        logging.disable(logging.CRITICAL)
        self._collects = gc.isenabled()
        gc.disable()
        sys.unraisablehook = lambda *arguments: None
        try:
            large = -1 if self.schedule.shape.large else saving.LARGE
            with (
                installed(self.system),
                patch.object(saving, "LARGE", large),
                patch.object(training_loop, "MAX_FAILED", 1.0),
                patch.object(server, "PREFIXES", ("",)),  # agents have no others
                warnings.catch_warnings(),
            ):
                warnings.simplefilter("ignore", RuntimeWarning)  # of coroutines that were killed
                shutil.copyfile(empty, self.folder / "store.db")
                (self.folder / "out").mkdir()
                self.invariants.open()
                for name in reversed(self.schedule.shape.names):
                    self.start(name)
                if self.schedule.shape.live:
                    self.start("users")
                self._go()
                self.invariants.close()
                self._bury()
        finally:
            sys.unraisablehook = unraisable
            logging.disable(disabled)
            if self._collects:
                gc.enable()
        return self

    def _go(self) -> None:
        try:
            self.loop.run(self._is_over)
            self.invariants.at_end()
        except Violation as violation:
            self.violation = violation
        except Stuck:
            self.violation = Violation("nobody can run, and the run has not ended")

    def _is_over(self) -> bool:
        loop = self.loop
        if loop.failures:
            process, error = loop.failures[0]
            raise Violation(f"{process}: {type(error).__name__}: {error}") from error
        if loop.now > LONGEST or loop.executed > MAX_EVENTS:
            raise Violation(f"the run has not ended after {loop.now:.0f} s")
        return self.finished

    def _bury(self) -> None:
        """Free the killed processes, when nothing that they do has an effect any more."""
        self.system.over = True
        for process in self.system.by_pid.values():
            self.system.kill(process)
            process.tasks.clear()
            process.threads.clear()
            process.unexecuted.clear()
        self.system.close_idle()
        self.loop.close()
        self.loop.clear()
        self.system.graveyard.clear()
        sim.THREADS.clear()
        if self._collects:
            gc.collect()

    def start(self, name: str) -> None:
        if self.finished:
            return
        process = self.system.new_process(name)
        self.started[name] += 1
        self.say(f"{name} starts")
        task = process.start(self._main(name))
        task.add_done_callback(
            lambda task: self._ended(process, task), context=self.kernel_context()
        )

    def _main(self, name: str) -> Any:
        if name == "algorithm":
            return actors.algorithm(self, self.config)
        if self.schedule.shape.live:
            return {
                "learner": lambda: live.learner(self, self.config),
                "gateway": lambda: live.gateway(self, self.config),
                "users": lambda: live.users(self),
            }[name]()
        if name == STORE:
            return actors.store_server(self)
        if name == "administrator":
            return administrator(self, self.config)
        config = self.config
        if self.schedule.shape.http:
            config = replace(config, store=f"http://{actors.KEYS['runner']}@store")
        return actors.runner(self, config, f"{name}-{self.loop.executed}")

    def kernel_context(self) -> contextvars.Context:
        context = contextvars.Context()
        context.run(LANE.set, Lane(self.system.kernel))
        return context

    def _ended(self, process: Process, task: Any) -> None:
        error = None if task.cancelled() else task.exception()
        current = self.system.processes[process.name] is process
        self.system.kill(process)
        if process.name in ("algorithm", "learner") and error is None:
            self.finished = True
            return
        if process.name == "users" and error is None:
            return
        if not self._may_end_with(process, error):
            self.loop.failures.append((process, error or Violation("it ended")))
        self.say(f"{process} ends: {error!r}"[:200])
        if current:
            self.restart(process.name)

    def _may_end_with(self, process: Process, error: BaseException | None) -> bool:
        """Whether a process may end with this error; its supervisor then starts it again."""
        full = isinstance(error, AgentRLError) and "cannot be written" in str(error)
        return full or isinstance(error, Unavailable | Fenced)

    def restart(self, name: str, pause: float = RESTART) -> None:
        self.loop.call_later(pause, self._restart, name, context=self.kernel_context())

    def _restart(self, name: str) -> None:
        if not self.system.processes[name].alive:
            self.start(name)

    def gateway_lives(self, call: Any = None) -> bool:
        """Whether the gateway of a live run lives, and `call` is one that it answers."""
        gateway = self.network.gateway
        return bool(gateway) and gateway[0].alive and (call is None or call.process is gateway[0])

    # -- what actors tell --------------------------------------------------------------------------

    def say(self, text: str) -> None:
        text = text.replace(str(self.folder), "")
        self.log.append(f"{self.loop.executed:6d} {self.loop.now:8.2f} s  {text}")

    def next_serial(self) -> int:
        self.serial += 1
        return self.serial

    def patience(self) -> float:
        return 60.0

    def began(self, state: RunState) -> None:
        self.invariants.began(self.system.here(), state.epoch)

    # -- faults ------------------------------------------------------------------------------------

    def next_fault(self) -> None:
        scarce = len(self.effective) < self.schedule.at_least
        if len(self.effective) >= ENOUGH or not (self._faults or scarce):
            self.loop.next_event = sys.maxsize
            if len(self.effective) >= ENOUGH:
                self.armed.clear()
                self.lost.clear()
            return
        if scarce and (self._has_all_steps() or not self._faults):
            names = self.schedule.shape.names
            living = next((name for name in names if self.alive(name)), names[0])
            fault = Fault("kill", living, 0.0, BURST)
        else:
            fault = self._faults.pop(0)
        self.loop.next_event = self.loop.executed + fault.gap
        if self._is_ending():
            self.loop.next_event = min(self.loop.next_event, self._soon())
        if not self.finished:
            fault.happen(self)

    def alive(self, target: str) -> Process | None:
        """The living process of a name, the last that was started."""
        process = self.system.processes.get(target)
        return process if process is not None and process.alive else None

    def kill(self, process: Process, pause: float = RESTART) -> None:
        current = self.system.processes[process.name] is process
        self.system.kill(process)
        if process.name == "gateway" and self.cut:
            self.invariants.forget_unstored_cuts()
        if current:
            self.restart(process.name, pause)

    def power_cut(self) -> None:
        for process in [*self.system.by_pid.values()]:
            if process.alive:
                self.kill(process)
        self.invariants.close()
        self.system.close_idle()
        lied = self.disk.lies
        self.disk.power_cut()
        self.invariants.open()
        self.invariants.forget()
        if not lied:
            self.invariants.after_power_cut()

    def stop_server(self, process: Process, pause: float) -> None:
        """As SIGTERM: it answers what it has, refuses the rest, and ends."""
        if self.network.store is not None and self.network.store[0] is process:
            self.loop.call_soon(self.network.store[1].drain, context=process.context.copy())
        end = lambda: self.kill(process) if process.alive else None  # noqa: E731
        self.loop.call_later(pause, end, context=self.kernel_context())

    def _damage_checkpoint(self) -> bool:
        """Damage a file of the newest checkpoint, if an earlier one is whole, and kill the process
        that has its content in memory."""
        run, shape = self.invariants.run, self.schedule.shape
        if shape.keep < 2:  # no earlier one
            return False
        if run is None or run[2] is None or run[2] in self.damaged or run[2] == self.only_whole:
            return False
        path = self.folder / "out" / run[2]
        identity = json.loads((path / STATE).read_text())["run"]
        earlier = earlier_checkpoints(path.parent, path, identity)
        if not any(f"checkpoints/{checkpoint.name}" not in self.damaged for checkpoint in earlier):
            self.only_whole = run[2]
            return False
        self.say(f"! a file of {run[2]} is damaged, and its algorithm killed")
        (path / "model.txt").write_text("damaged")
        self.damaged.add(run[2])
        if owner := self.alive("algorithm"):
            end = lambda: self.kill(owner) if owner.alive else None  # noqa: E731
            self.loop.call_soon(end, context=self.kernel_context())
        return True

    def at_commit(self, process: Process, when: str) -> None:
        self._interrupt(process, when)
        if when == "after" and process is not self.system.kernel:
            self.invariants.after_commit(process)
            if self.rotting and self._damage_checkpoint():
                self.had_effect(self.rotting.pop())
            if self._is_ending() and self.loop.next_event != sys.maxsize:
                self.loop.next_event = min(self.loop.next_event, self._soon())

    def _soon(self) -> int:
        """When the next fault happens in the last step."""
        return self.loop.executed + (1 if self._has_all_steps() else BURST // 2)

    def _has_all_steps(self) -> bool:
        """Whether a run has all its steps, and only has to end."""
        shape, run = self.schedule.shape, self.invariants.run
        if shape.live:
            return self.users_left == 0
        return run is not None and run[1] >= shape.steps

    def _is_ending(self) -> bool:
        """Whether a run is in its last step: its remaining faults then follow at once."""
        shape, run = self.schedule.shape, self.invariants.run
        if shape.live:
            return self.users_left < live.SESSIONS
        return run is not None and run[1] >= shape.steps - 1

    def at_statement(self, process: Process) -> None:
        self._interrupt(process, "statement")

    def at_sync(self, descriptor: int) -> None:
        self._interrupt(self.system.here(), "sync")
        self.disk.sync(descriptor)

    def _interrupt(self, process: Process, when: str) -> None:
        armed = self.armed.get(process.name)
        if armed and armed[0].when == when and greenlet.getcurrent() is not self.loop.hub:
            if when == "after":  # it counts, whatever happens now
                self.invariants.after_commit(process)
            armed.pop(0).interrupt(self, process)

    def yield_thread(self) -> None:
        sim.current_thread().block(0.0)

    def is_lost(self, what: str) -> bool:
        if not self.lost[what]:
            return False
        self.had_effect(self.lost[what].pop(0))
        return True

    def had_effect(self, fault: Fault) -> None:
        self.effective[id(fault)] = fault


@cache
def settings(shape: Shape) -> RunConfig:
    """The run file of a shape, without its paths."""
    return resolve(
        {
            "name": NAME,
            "steps": shape.steps,
            "policy": {"model": "model"}, "agent": {"path": "agent.py:agent",
                "max_attempts": 99, "timeout": 600.0},
            "tasks": {"train": "tasks.jsonl"}, "verifier": {"path": "verifier.py:verify"},
            "algorithm": {"groups": shape.groups, "group_size": shape.size,
                "max_staleness": shape.staleness, "preset": "grpo"},
            "runner": {"concurrency": SLOTS, "lease": LEASE},
            "keep_checkpoints": shape.keep,
            **({"sessions": {"idle": 30.0}} if shape.live else {}),
        },
        source="simulation",
    )  # fmt: skip


MEMORY = "/dev/shm" if Path("/dev/shm").is_dir() else None  # a folder in memory
_TEMPLATE: list[Path] = []


def template() -> Path:
    """An empty store."""
    if not _TEMPLATE:
        folder = tempfile.mkdtemp(prefix="simulation-", dir=MEMORY)
        atexit.register(shutil.rmtree, folder, ignore_errors=True)
        path = Path(folder, "template.db")
        prepare(Location.parse(f"sqlite:///{path}"))
        conn = sqlite3.connect(path)
        conn.execute("pragma wal_checkpoint(truncate)")
        conn.close()
        _TEMPLATE.append(path)
    return _TEMPLATE[0]


def simulate(schedule: Schedule) -> World:
    folder = Path(tempfile.mkdtemp(prefix="simulation-", dir=MEMORY))
    try:
        return World(schedule, folder).run()
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        shutil.rmtree(f"{folder}-kept", ignore_errors=True)
