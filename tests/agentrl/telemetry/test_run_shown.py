"""The view and the report read a store in which a short run has happened."""

import asyncio
import io
from pathlib import Path

import pytest
from rich.console import Console

from agentrl.core.config import RunConfig, resolve
from agentrl.core.types import (
    ErrorKind,
    Failure,
    NewRollout,
    Outcome,
    PolicyVersion,
    Purpose,
    Reward,
    StepRow,
)
from agentrl.store import open_store
from agentrl.store.base import Store
from agentrl.telemetry import console as view
from agentrl.telemetry import report
from agentrl.telemetry.console import RunWarnings, roles_without_calls
from tests import factories

METRICS = {
    "reward/mean": 0.5,
    "reward/std": 0.25,
    "rollouts": 60.0,
    "tokens/completion": 1200.0,
    "time/rollouts": 2.0,
    "time/update": 1.0,
    "calls/refused": 3.0,
    "calls/too_long": 1.0,
    "policy/entropy": 1.5,
    "staleness/version_max": 1.0,
    "staleness/version_mean": 0.5,
    "sampler/ess": 0.75,
    "time/learner_idle": 2.0,
    "time/sampler_idle": 0.5,
    "tokens/wasted": 7.0,
    "policy/clip_fraction": 0.125,
}


@pytest.fixture
def config(tmp_path: Path) -> RunConfig:
    return resolve({"name": "r", "output": str(tmp_path), "steps": 4}, source="test")


async def finished(store: Store, rollouts: list[NewRollout], reward: float | None) -> None:
    await store.enqueue(rollouts)
    for attempt in await store.claim(len(rollouts), runner="test", lease=60):
        failure = Failure(kind=ErrorKind.AGENT, message="it broke at [/INST]")
        rewards = [Reward(value=reward)] if reward is not None else []
        outcome = Outcome(
            attempt=attempt.id,
            fence=attempt.fence,
            rewards=rewards,
            failure=None if rewards else failure,
        )
        assert await store.finish([outcome]) == [True]


async def short_run(store: Store) -> None:
    state = await store.open_run("r", {})
    for index, reward in enumerate((1.0, 0.0, None)):
        group = f"r/eval/000000/{index}"
        rollout = NewRollout(
            id=f"{group}/0000", run="r", group=group, index=0, task={}, purpose=Purpose.EVAL
        )
        await finished(store, [rollout], reward)
    await store.log("r", 0, {"eval/score": 0.25, "eval/sampled": 0.2})
    version = PolicyVersion(run="r", policy="policy", version=0, base_url="http://x/v1", model="p")
    await store.publish(version)
    for step in range(2):
        group = f"r/train/g{step:07d}"
        rollout = NewRollout(id=f"{group}/0000", run="r", group=group, index=0, task={}, step=step)
        await finished(store, [rollout], 1.0)
        (claimed,) = await store.claim_groups("r", state.epoch, 1)
        await store.commit_step(
            factories.commit(
                step,
                [claimed.id],
                epoch=state.epoch,
                versions={"policy": step + 1},
                checkpoint=f"/checkpoints/{step + 1}",
                metrics=METRICS,
            )
        )
    await store.log("r", 2, {"eval/score": 0.75})


async def test_progress_of_a_run(config: RunConfig) -> None:
    async with open_store(config.store) as store:
        await short_run(store)
        model = view.Progress(config)
        await model.update(store)
        console = Console(file=io.StringIO(), width=120)
        console.print(model.table())
        assert isinstance(console.file, io.StringIO)
        text = console.file.getvalue()
    assert "step 2/4" in text
    assert "6 s left" in text
    assert "reward 50.0%  " in text
    assert "held-out 75.0% (from 25.0%)" in text
    assert "30 rollouts/s" in text
    assert "600 tokens/s" in text
    assert "1 rollout failed" in text
    assert "entropy 1.500" in text
    assert "lag 0.500" in text
    assert "ESS 0.750" in text
    assert "sampler idle 17%" in text
    assert "learner idle 67%" in text
    assert "clipped 0.125" in text
    assert "KL" not in text  # one optimizer step: nothing moved


@pytest.mark.parametrize("notebook", [False, True])
async def test_lines_where_there_is_no_terminal(
    config: RunConfig, notebook: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if notebook:  # whose commands believe that there is one
        monkeypatch.setenv("JPY_PARENT_PID", "1")
    console = Console(
        file=io.StringIO(), width=120, force_terminal=notebook or None, color_system=None
    )
    async with open_store(config.store) as store:
        await short_run(store)
        following = asyncio.create_task(view.show_progress(store, config, console))
        assert isinstance(console.file, io.StringIO)
        cursor = await store.cursor()
        while "step 2/4" not in console.file.getvalue():
            cursor = await store.wait(cursor, timeout=0.05)
        following.cancel()
    assert console.file.getvalue().count("4 model calls are not trained") == 1
    assert "step 1/4  reward 50.0%  30 rollouts/s" in console.file.getvalue()


async def test_the_last_steps_of_a_run_have_their_lines(config: RunConfig) -> None:
    """Also when it ends before the console looks again."""
    console = Console(file=io.StringIO(), width=120)
    assert isinstance(console.file, io.StringIO)
    async with open_store(config.store) as store:
        await store.open_run("r", {})
        following = asyncio.create_task(view.show_progress(store, config, console))
        while "preparing" not in console.file.getvalue():
            await store.wait(2**62, timeout=0.05)
        await short_run(store)
        following.cancel()
        await asyncio.wait((following,))
    assert "step 1/4  reward 50.0%" in console.file.getvalue()
    assert "step 2/4" in console.file.getvalue()


async def test_a_line_says_that_the_policy_is_prepared(config: RunConfig) -> None:
    """Without a terminal too, and not where it is ready already."""
    console = Console(file=io.StringIO(), width=120)
    assert isinstance(console.file, io.StringIO)
    async with open_store(config.store) as store:
        await store.open_run("r", {})
        for expected in (1, 1):
            following = asyncio.create_task(view.show_progress(store, config, console))
            while "preparing" not in console.file.getvalue():
                await store.wait(2**62, timeout=0.05)
            await store.wait(2**62, timeout=0.2)
            following.cancel()
            await asyncio.wait((following,))
            assert console.file.getvalue().count("preparing the policy") == expected
            version = PolicyVersion(
                run="r", policy="policy", version=0, base_url="http://x/v1", model="p"
            )
            await store.publish(version)


async def test_the_first_failure_of_each_kind_is_said_at_once(config: RunConfig) -> None:
    """Once, on a line of its own, with the way to all of it; that of an earlier start is not."""
    console = Console(file=io.StringIO(), width=300)
    warnings = RunWarnings(config, console)
    assert isinstance(console.file, io.StringIO)
    async with open_store(config.store) as store:
        await store.open_run("r", {})
        rollouts = [
            NewRollout(id=f"g/{i}", run="r", group="g", index=i, task={}, max_attempts=9)
            for i in range(4)
        ]
        await finished(store, rollouts[:1], None)
        await warnings.print_new(store, [])
        assert console.file.getvalue() == ""
        await finished(store, rollouts[1:3], None)
        for _ in range(2):
            await warnings.print_new(store, [])
        await store.enqueue(rollouts[3:])
        (attempt,) = await store.claim(1, runner="test", lease=60)
        failure = Failure(kind=ErrorKind.MODEL, message="gone\nfor good " + "x" * 999)
        retried = Outcome(attempt=attempt.id, fence=1, failure=failure, retry=True)
        await store.finish([retried])
        unseen = StepRow(run="r", step=0, metrics={"calls/tools_unseen": 3.0}, committed=True, at=0)
        for _ in range(2):
            await warnings.print_new(store, [unseen])
    lines = console.file.getvalue().splitlines()
    store_url = f"--store {config.store}"
    assert lines[0] == "agent_error: 3 attempts failed so far: it broke at [/INST]"
    assert lines[1].endswith(store_url)
    assert lines[1].startswith("  see it: agentrl show g/")
    assert lines[2].startswith("model_error: an attempt failed so far: gone for good xxx")
    assert len(lines[2]) < 500
    assert lines[3] == f"  see it: agentrl show g/3 {store_url}"
    assert lines[4].startswith("tools are not seen: 3 model calls")
    assert len(lines) == 5


async def test_a_step_that_taught_nothing_says_why(config: RunConfig) -> None:
    counts = {"rollouts/empty": 8.0, "rollouts/failed": 6.0}
    row = StepRow(run="r", step=0, metrics=counts, committed=True, at=0.0)
    line = view.Progress(config, rows=[row]).line(row)
    assert line == "step 1/4  nothing to learn from: 6 of 8 rollouts failed"
    counts = {"rollouts": 8.0, "rollouts/failed": 3.0, "reward/mean": 0.5}
    counts |= {"rollouts/failed/verifier_error": 2.0, "rollouts/failed/timeout": 1.0}
    row = StepRow(run="r", step=0, metrics=counts, committed=True, at=0.0)
    line = view.Progress(config, rows=[row]).line(row)
    assert "3 of 8 rollouts failed (1 timeout, 2 verifier_error)" in line


async def test_report(config: RunConfig) -> None:
    console = Console(file=io.StringIO(), width=120)
    async with open_store(config.store) as store:
        await short_run(store)
        steps = await store.steps("r")
        await report.print_report(store, config, steps, "/checkpoints/2", 9.0, console)
    assert isinstance(console.file, io.StringIO)
    text = console.file.getvalue()
    row = next(line for line in text.splitlines() if "score" in line)
    assert "25.0%" in row
    assert "75.0%" in row
    assert "r/eval/000000/0/0000: succeeded, outcome 1" in text
    assert "A failure, after 0 steps" in text
    assert "1 rollout failed (1 agent_error); the last one: it broke at [/INST]" in text
    assert "9 s: 3 start-up, 4 rollouts, 2 updates; 14 tokens of cancelled rollouts" in text
    assert "4 model calls without token ids were not trained; 2 model calls longer than" in text
    assert Path(config.output, "curve.png").stat().st_size > 1000
    assert text.splitlines()[-1] == f"Next: agentrl view {config.store} --run r --open"


async def test_the_report_reads_what_it_shows_and_not_the_run(
    config: RunConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    console = Console(file=io.StringIO(), width=120)
    async with open_store(config.store) as store:
        await short_run(store)
        many = [
            NewRollout(id=f"m/{i}", run="r", group="m", index=i, task={}, step=3) for i in range(40)
        ]
        await finished(store, many, 1.0)
        read = []

        async def rollouts(run: str, **filters: object) -> list:
            read.extend(found := await type(store).rollouts(store, run, **filters))
            return found

        monkeypatch.setattr(store, "rollouts", rollouts)
        steps = await store.steps("r")
        await report.print_report(store, config, steps, None, 9.0, console)
    assert isinstance(console.file, io.StringIO)
    assert "1 rollout failed (1 agent_error); the last" in console.file.getvalue()
    assert {row.purpose for row in read} == {Purpose.EVAL}


async def test_a_role_of_the_run_file_that_never_speaks_is_named(tmp_path: Path) -> None:
    made = {"name": "r", "output": str(tmp_path), "steps": 4, "policy": {"model": "m"}}
    spoken = resolve(made | {"roles": {"agent": "policy"}}, source="test")
    config = resolve(made | {"roles": {"agent": "policy", "critc": "policy"}}, source="test")
    async with open_store(config.store) as store:
        await short_run(store)
        console = Console(file=io.StringIO(), width=400)
        warnings = RunWarnings(config, console)
        for _ in range(2):
            await warnings.print_new(store, await store.steps("r"))
        assert await roles_without_calls(store, resolve(made, source="test")) == ""
        assert "the role 'agent'" in await roles_without_calls(store, spoken)
    assert isinstance(console.file, io.StringIO)
    text = console.file.getvalue()
    assert text.count("no call was made in the first step in the role 'agent', 'critc'") == 1
    assert "the roles with calls are none" in text


async def test_a_quiet_view_prints_what_it_warns_of_alone(config: RunConfig) -> None:
    console = Console(file=io.StringIO(), width=120)
    async with open_store(config.store) as store:
        await short_run(store)
        following = asyncio.create_task(view.show_progress(store, config, console, quiet=True))
        assert isinstance(console.file, io.StringIO)
        cursor = await store.cursor()
        while "not trained" not in console.file.getvalue():
            cursor = await store.wait(cursor, timeout=0.05)
        following.cancel()
    assert "step" not in console.file.getvalue()
