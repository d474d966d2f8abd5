"""Schedules violate no invariant, and the simulator itself is correct: see README.md."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from tests.simulation import explore
from tests.simulation.loop import Process, SimulatedLoop, Stuck, Thread
from tests.simulation.planted import PATCHES, ROOT, search
from tests.simulation.schedule import Fault, Schedule, Shape, drawn

SEEDS = 200


def test_schedules_violate_no_invariant() -> None:
    command = [sys.executable, "-m", "tests.benchmarks.simulation", "--real", "--json"]
    done = subprocess.run(
        [*command, "--seeds", str(SEEDS)], cwd=ROOT, env=os.environ | {"PYTHONHASHSEED": "0"},
        stdout=subprocess.PIPE, check=False,
    )  # fmt: skip
    report = json.loads(done.stdout)
    assert report["violated"] == []
    assert report["schedules"] == SEEDS
    assert report["faults_min"] >= 20  # that had an effect


def test_patches_of_planted_faults_apply() -> None:
    assert len(PATCHES) >= 10
    subprocess.run(["git", "apply", "--check", *PATCHES[:1]], cwd=ROOT, check=True)
    for patch in PATCHES:
        subprocess.run(["git", "apply", "--check", patch], cwd=ROOT, check=True)


# Faults that at least one schedule in five shows; `python -m tests.benchmarks.simulation --planted`
# searches all of them, which takes up to hundreds of schedules each.
FREQUENT = ("claim_without_limit", "epoch_not_raised", "fence_not_checked")


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("name", FREQUENT)
def test_a_planted_fault_is_found(name: str) -> None:
    (patch,) = (path for path in PATCHES if path.stem == name)
    assert search(patch, max_seeds=100, processes=2)["found"]


TWICE = """
from dataclasses import replace
from tests.simulation import explore
from tests.simulation.schedule import Shape, drawn

for shape in (Shape(), Shape(http=True), Shape(live=True)):
    schedule = replace(drawn(3), shape=shape)
    explore.warm_up(shape.http)
    first, again = explore.simulate(schedule), explore.simulate(schedule)
    assert first.log == again.log, shape
    assert first.loop.executed == again.loop.executed, shape
"""


def test_a_schedule_is_the_same_whenever_it_is_run() -> None:
    """Run in a separate process, as schedules are: other tests leave caches and connections."""
    environment = os.environ | {"PYTHONHASHSEED": "0"}
    subprocess.run([sys.executable, "-c", TWICE], cwd=ROOT, env=environment, check=True)


@pytest.mark.parametrize("shape", [Shape(steps=1, groups=1), Shape(http=True), Shape(live=True)])
def test_kills_follow_if_too_few_faults_had_an_effect(shape: Shape) -> None:
    """No process has the name that these faults target."""
    faults = (Fault("kill", "nobody", 0.0, 5),) * 40
    world = explore.simulate(Schedule(0, shape, faults, at_least=20))
    assert world.violation is None
    assert len(world.effective) == 20
    assert not explore.simulate(Schedule(0, shape, faults)).effective


def test_a_schedule_can_be_saved(tmp_path: Path) -> None:
    schedule = drawn(4)
    explore.save(schedule, tmp_path / "schedule.jsonl")
    assert explore.load(tmp_path / "schedule.jsonl") == schedule


def test_faults_that_are_left_happen_when_they_did() -> None:
    schedule = drawn(5)
    fewer = explore.without(schedule, range(3, 7))
    assert times(fewer) == times(schedule)[:3] + times(schedule)[7:]


def times(schedule: Schedule) -> list[int]:
    at, moments = schedule.first, []
    for fault in schedule.faults:
        moments.append(at)
        at += fault.gap
    return moments


def test_what_violates_is_shrunk_and_described(monkeypatch: pytest.MonkeyPatch) -> None:
    """A run in which one fault of many is the cause."""
    cause = Fault("clock", "", 1234.5)
    schedule = replace(drawn(6), faults=(*drawn(6).faults[:9], cause, *drawn(6).faults[9:]))

    def run(schedule: Schedule) -> explore.Result:
        log = [f"! {fault}" for fault in schedule.faults] * 9
        is_wrong = any(fault.amount == cause.amount for fault in schedule.faults)
        return explore.Result(6, "wrong" if is_wrong else "", log=log)

    monkeypatch.setattr(explore, "run", run)
    shrunk = explore.shrink(schedule)
    assert [fault.amount for fault in shrunk.faults] == [cause.amount]
    text = explore.described(schedule, run(schedule)).splitlines()
    assert len(text) <= explore.MAX_LINES
    assert text[0] == "seed 6: wrong"


# -- the computer ----------------------------------------------------------------------------------


def machine() -> tuple[SimulatedLoop, Process]:
    loop = SimulatedLoop(0)
    loop.kernel = Process(loop, "kernel", 1)
    return loop, Process(loop, "process", 2)


def test_time_passes_only_while_nobody_runs() -> None:
    loop, process = machine()
    task = process.start(asyncio.sleep(3600.0))
    loop.run(task.done)
    assert loop.now == 3600.0
    loop.close()


def test_a_killed_process_executes_nothing_more() -> None:
    loop, process = machine()
    ended: list[str] = []

    async def work() -> None:
        try:
            await asyncio.sleep(1.0)
        finally:
            ended.append("finally")

    task = process.start(work())
    loop.call_later(0.5, loop.kill, process, context=loop.kernel.context.copy())
    with pytest.raises(Stuck):
        loop.run(task.done)
    assert not ended
    task._coro.close()  # type: ignore[attr-defined]
    loop.close()


def test_a_suspended_process_continues_where_it_was() -> None:
    loop, process = machine()
    task = process.start(asyncio.sleep(1.0))
    loop.call_later(0.5, loop.freeze, process, 10.0, context=loop.kernel.context.copy())
    loop.run(task.done)
    assert loop.now == 10.5
    loop.close()


def test_a_thread_waits_without_blocking_the_others() -> None:
    loop, process = machine()
    order: list[str] = []

    async def main() -> None:
        from tests.simulation.loop import sleep

        thread = Thread(target=lambda: (sleep(2.0), order.append("thread")))
        thread.start()
        await asyncio.sleep(1.0)
        order.append("loop")
        await asyncio.to_thread(thread.join)

    task = process.start(main())
    loop.run(task.done)
    assert order == ["loop", "thread"]
    loop.close()
