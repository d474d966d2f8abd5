"""`kill -9` at random moments, then the same command again: nothing lost, nothing trained twice."""

from __future__ import annotations

import asyncio
import os
import random
import signal
import sqlite3
import subprocess
import time
from functools import partial
from pathlib import Path

import pytest

from agentrl.core.types import Purpose, RolloutState
from agentrl.store import open_store
from tests import warm

VICTIMS = [("runner",), ("algorithm",), ("runner", "algorithm")]
GROUPS, SIZE = 2, 4
LARGE = """
from agentrl.algorithms.train import saving

saving.LARGE = 0  # the algorithm process reads the tasks too
tasks = [{"input": f"What is {i} plus {i + 1}?", "answer": 2 * i + 1} for i in range(20)]
"""


def children(pid: int) -> dict[str, int]:
    """`runner` and `algorithm` processes of a launcher, by name."""
    listed = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    return {Path(f"/proc/{child}/comm").read_text().strip(): int(child) for child in listed}


def committed(database: Path) -> int:
    if not database.exists():
        return 0
    with sqlite3.connect(f"file:{database}?mode=ro", uri=True) as connection:
        try:
            return int(
                connection.execute("select count(*) from steps where committed").fetchone()[0]
            )
        except sqlite3.OperationalError:
            return 0  # the schema is not there yet


@pytest.mark.timeout(360)
@pytest.mark.parametrize(
    ("kills", "steps", "every"),
    [
        (2, 16, []),
        pytest.param(5, 40, [], marks=pytest.mark.slow),
        (3, 16, ["checkpoint.every=3"]),
        # As a large one, written beside training.
        pytest.param(
            *(5, 24, ["checkpoint.every=1", "tasks.train=large.py:tasks"]), marks=pytest.mark.slow
        ),
    ],
)
def test_killed_at_random_moments_the_run_ends_where_it_would_have_ended(
    run_folder: Path, kills: int, steps: int, every: list[str]
) -> None:
    (run_folder / "large.py").write_text(LARGE)
    database = run_folder / "out" / "store.db"
    command = ["-m", "agentrl", "train", "run.toml", f"steps={steps}", *every]
    command += [f"algorithm.groups={GROUPS}", f"algorithm.group_size={SIZE}"]
    start = partial(warm.start, *command, cwd=run_folder, spare=2 + kills)
    chance = random.Random(20261121)
    made = 0
    process = start()
    try:
        while made < kills:
            wait_for_progress(process, database, steps)
            time.sleep(chance.uniform(0.0, 0.6))
            made += kill(process, chance.choice(VICTIMS))
            if process.poll() is not None:
                process = start()
        while process.wait(timeout=120) != 0:  # the last kill may have ended this start as well
            process = start()
    finally:
        process.close()
    asyncio.run(check(run_folder, database, steps))


def wait_for_progress(
    process: warm.Process | subprocess.Popen[bytes], database: Path, steps: int
) -> None:
    """Until the run has committed another step, or an earlier kill has ended the launcher."""
    before = committed(database)
    deadline = time.monotonic() + 90
    while committed(database) == before and process.poll() is None:
        assert time.monotonic() < deadline, "the run made no progress"
        time.sleep(0.02)
    assert committed(database) < steps, "the run ended before all kills were made"


def kill(process: warm.Process, victims: tuple[str, ...]) -> int:
    """1 if any victim was there to be killed. Without the algorithm the launcher ends as well."""
    processes = children(process.pid) if process.poll() is None else {}
    found = [processes[name] for name in victims if name in processes]
    for pid in found:
        os.kill(pid, signal.SIGKILL)
    if "algorithm" in victims and found:
        assert process.wait(timeout=60) == 2
    return bool(found)


@pytest.mark.slow
@pytest.mark.timeout(240)
def test_a_second_start_leaves_a_live_run_alone(run_folder: Path) -> None:
    """Until it takes the run over, or the first is killed with `kill -9`."""
    database, said = run_folder / "out" / "store.db", run_folder / "said"
    steps = 400
    command = ["-m", "agentrl", "train", "run.toml", f"steps={steps}", "algorithm.groups=1"]
    start = partial(warm.start, *command, cwd=run_folder, spare=8)
    with said.open("wb") as errors:
        first = start(errors=errors)
    wait_for_progress(first, database, steps)
    for option in ([], ["--fresh"]):
        second = warm.run(*command, *option, cwd=run_folder)
        assert second.returncode == 2
        assert f"run 'tiny' is live (process {first.pid} on " in second.stderr
    wait_for_progress(first, database, steps)
    third = warm.start(*command, "--take-over", cwd=run_folder, spare=8)
    assert first.wait(timeout=60) == 2
    assert f"run 'tiny' was taken over (process {third.pid} on " in said.read_text()
    wait_for_progress(third, database, steps)
    third.kill()
    third.wait(timeout=60)
    fourth = start()
    wait_for_progress(fourth, database, steps)
    assert fourth.poll() is None
    fourth.close()


async def check(folder: Path, database: Path, last: int) -> None:
    async with open_store(f"sqlite:///{database}") as store:
        (run,) = await store.runs()
        state = await store.run(run)
        steps = [row for row in await store.steps(run) if row.committed]
        rollouts = await store.rollouts(run, purpose=Purpose.TRAIN)
    assert state is not None
    assert state.step == last
    assert [row.step for row in steps] == list(range(last))
    assert state.checkpoint is not None
    assert (folder / "out" / state.checkpoint / "model.safetensors").is_file()
    assert len(rollouts) == last * GROUPS * SIZE
    assert {row.state for row in rollouts} == {RolloutState.SUCCEEDED}
    with sqlite3.connect(f"file:{database}?mode=ro", uri=True) as connection:
        trained = connection.execute(
            "select id, trained_step from groups where purpose = 'train'"
        ).fetchall()
    assert sorted(step for _, step in trained) == sorted(list(range(last)) * GROUPS)
