"""What processes log is on the console, from the level the user chose."""

from __future__ import annotations

import asyncio
import contextlib
import io
import logging
import os
import subprocess
import sys
from datetime import datetime
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace
from rich.console import Console

from agentrl.core.config import resolve
from agentrl.core.files import duration_text
from agentrl.core.processes import LOG_LEVEL, PHASE, log_phase
from agentrl.core.types import Counts, NewRollout, Outcome, Purpose, StepCommit, StepRow
from agentrl.store import open_store
from agentrl.telemetry.console import LogFollower, Progress, console_level, show_progress
from agentrl.telemetry.report import print_report
from tests.factories import refused

LOGGED = """
import logging
from agentrl.core.processes import log_phase, log_to_stderr
log_to_stderr()
log = logging.getLogger("agentrl.runner")
log.debug("very fine"), log.info("fine"), log_phase(log, "building"), log.warning("it is slow")
logging.getLogger("other").warning("theirs")
"""


@cache
def logged(level: str) -> bytes:
    """What a process logs, as it is told by this variable."""
    environment = dict(os.environ) | ({LOG_LEVEL: level} if level else {})
    command = [sys.executable, "-c", LOGGED]
    return subprocess.run(command, env=environment, capture_output=True, check=True).stderr


def shown(folder: Path, level: int, *, again: str = "") -> list[str]:
    """The console's lines of two runners that log the same."""
    console = Console(file=io.StringIO(), width=30)
    files = [folder / "runner-0.log", folder / "runner-1.log"]
    files[0].write_text("2026-01-01 00:00:00,000 ERROR agentrl.runner: of an earlier start\n")
    follower = LogFollower(console, level, files)
    for file in files:
        with file.open("ab") as log:
            log.write(logged(again))
    follower.look()
    follower.look()
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue().splitlines()


def test_phases_and_warnings_are_shown_and_the_same_warning_once(tmp_path: Path) -> None:
    assert shown(tmp_path, PHASE) == ["building", "warning: it is slow (runner-0.log)", "building"]


async def test_three_hundred_warnings_of_one_kind_are_two_lines(tmp_path: Path) -> None:
    file, console = tmp_path / "runner-0.log", Console(file=io.StringIO(), width=200)
    follower = LogFollower(console, PHASE, [file])
    start = "2026-01-01 00:00:00,000 WARNING agentrl.runner: "
    lines = [f"{start}attempt 7f{n:03}a lost its lease after {n} s\n" for n in range(300)]
    file.write_text("".join([*lines, f"{start}it is slow\n"]))
    following = asyncio.create_task(follower.follow())
    await asyncio.sleep(0)
    following.cancel()
    await asyncio.gather(following, return_exceptions=True)
    assert isinstance(console.file, io.StringIO)
    assert console.file.getvalue().splitlines() == [
        "warning: attempt 7f000a lost its lease after 0 s (runner-0.log)",
        "warning: it is slow (runner-0.log)",
        "warning: 299 more like it, the last one: attempt 7f299a lost its lease after 299 s",
    ]


def test_other_libraries_see_level_names_of_python_only(caplog: pytest.LogCaptureFixture) -> None:
    """Inspect and others validate the names of records that reach their handlers."""
    caplog.set_level(PHASE, "agentrl.runner")
    log_phase(logging.getLogger("agentrl.runner"), "100 % of it")
    (record,) = caplog.records
    assert (record.levelno, record.getMessage()) == (PHASE, "100 % of it")
    assert record.levelname == "INFO"
    assert "PHASE" not in logging.getLevelNamesMapping()
    assert logging.getLevelName(logging.INFO) == "INFO"


def test_a_quiet_console_shows_warnings_and_a_verbose_one_all(tmp_path: Path) -> None:
    quiet = console_level(quiet=True, verbose=False)
    assert shown(tmp_path, quiet) == ["warning: it is slow (runner-0.log)"]
    verbose = shown(tmp_path, console_level(quiet=False, verbose=True))
    assert "info: fine (runner-0.log)" in verbose
    assert not any("very fine" in line for line in verbose)


def test_the_log_level_decides_what_is_in_the_files(tmp_path: Path) -> None:
    assert any("very fine" in line for line in shown(tmp_path, logging.DEBUG, again="DEBUG"))
    assert not any("building" in line for line in shown(tmp_path, 0, again="WARNING"))


async def test_half_a_line_waits_and_the_last_words_are_shown(tmp_path: Path) -> None:
    console, file = Console(file=io.StringIO(), width=80), tmp_path / "algorithm.log"
    follower = LogFollower(console, PHASE, [file])
    file.write_bytes(b"2026-01-01 00:00:00,000 PHASE agentrl.algorithm: loading")
    following = asyncio.create_task(follower.follow())
    await asyncio.sleep(0)
    assert isinstance(console.file, io.StringIO)
    assert console.file.getvalue() == ""
    file.write_bytes(file.read_bytes() + b" the model\n")
    following.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await following
    assert console.file.getvalue() == "loading the model\n"


@pytest.mark.parametrize(
    ("options", "said"), [(["--quiet", "--verbose"], "not both"), (["--log-level", "LOUD"], "LOUD")]
)
def test_levels_that_are_none_are_refused(options: list[str], said: str) -> None:
    assert said in refused("train", "none.toml", *options)


async def test_a_score_names_the_steps_of_the_scored_policy(tmp_path: Path) -> None:
    config = resolve({"name": "r", "output": str(tmp_path), "steps": 2}, source="test")
    console = Console(file=io.StringIO(), width=100)
    async with open_store(config.store) as store:
        await store.open_run("r", {})
        base: Any = {"run": "r", "epoch": 1, "groups": [], "versions": {}, "checkpoint": None}
        base |= {"metrics": {}}
        for step in range(3):
            await store.log("r", step, {"eval/score": step / 4, "eval/function/f": 1.0})
            if step < 2:
                await store.commit_step(StepCommit(**base, step=step))
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(0.5):
                await show_progress(store, config, console)
    assert isinstance(console.file, io.StringIO)
    said = console.file.getvalue()
    lines = [line.split("  ")[0] for line in said.splitlines() if ": " in line or "/2" in line][1:]
    assert lines == ["untrained:", "step 1/2", "after step 1:", "step 2/2", "after step 2:"]
    assert "after step 2:  held-out 50.0%" in said
    assert "2 of 2 steps are done already" in said
    assert said.count("s left") == 1  # of the last step alone: the others are past


def stepped(step: int, *, committed: bool = True, **metrics: float) -> StepRow:
    named = {key.replace("_", "/", 1): value for key, value in metrics.items()}
    return StepRow(run="r", step=step, metrics=named, committed=committed, at=0.0)


def test_rewards_are_percentages_until_one_is_no_fraction(tmp_path: Path) -> None:
    """Decided for the run, not line by line."""
    config = resolve({"name": "r", "output": str(tmp_path), "steps": 9}, source="test")
    progress = Progress(config, [stepped(0, reward_mean=0.25, reward_std=0.4, eval_score=0.5)])
    progress.judge()
    assert "  reward 25.0%  -" in progress.line(progress.rows[0])
    assert progress.scores_line(progress.rows[0]) == "untrained:  held-out 50.0%"
    progress.rows.append(stepped(1, reward_mean=-0.5, reward_std=0.5))
    progress.judge()
    assert "  reward -0.500 ± 0.500  -" in progress.line(progress.rows[1])
    assert progress.scores_line(progress.rows[0]) == "untrained:  held-out 0.500"


def test_a_held_out_score_says_what_has_none(tmp_path: Path) -> None:
    config = resolve({"name": "r", "output": str(tmp_path), "steps": 9}, source="test")
    metrics = {"eval/score": 1.0, "eval/tasks": 44.0, "eval/score_missing": 40.0}
    row = replace(stepped(9), metrics=metrics)
    said = Progress(config, [row]).scores_line(row)
    assert said.endswith("held-out 100.0% of 44 tasks, 40 rollouts without a score")


def test_a_step_says_the_reward_that_is_trained(tmp_path: Path) -> None:
    """The outcome alone would be the verifier's, while a judge's is maximised."""
    settings = {"name": "r", "output": str(tmp_path), "steps": 9}
    config = resolve(settings | {"algorithm": {"options": {"reward": "quality"}}}, source="test")
    judged = {"reward/quality/mean": 0.288, "reward/quality/std": 0.2}
    row = replace(stepped(0), metrics={"reward/mean": 0.125} | judged)
    assert "reward 12.5%  quality 28.8%" in Progress(config, [row]).line(row)
    row = replace(row, metrics=row.metrics | {"reward/quality/mean": 7.5})
    assert "quality 7.500" in Progress(config, [row]).line(row)


def test_a_step_on_pairs_says_which_way_the_chosen_went(tmp_path: Path) -> None:
    config = resolve({"name": "r", "output": str(tmp_path), "steps": 9}, source="test")
    for drop, said in ((0.25, "chosen -0.250"), (-0.061, "chosen +0.061"), (0.0, "chosen +0.000")):
        row = stepped(0, data_epochs=1.0, logps_chosen_drop=drop)
        assert f"log-prob of the {said}" in Progress(config, [row]).line(row)


def test_a_score_of_few_tasks_is_said_with_its_interval(tmp_path: Path) -> None:
    config = resolve({"name": "r", "output": str(tmp_path), "steps": 9}, source="test")
    bounds = {"eval_score_low": 0.3, "eval_score_high": 0.95}
    rows = [
        stepped(0, eval_score=0.75, eval_tasks=4.0, **bounds),
        stepped(5, committed=False, eval_score=0.421875, eval_tasks=64.0),
    ]
    progress = Progress(config, rows)
    assert [progress.scores_line(row) for row in rows] == [
        "untrained:  held-out 75.0% of 4 tasks (95 % interval 30.0% to 95.0%)",
        "after step 5:  held-out 42.2% of 64 tasks",
    ]


@pytest.mark.parametrize(
    ("ready", "rates"),
    [
        (0, "8 rollouts/s  160 tokens/s"),
        (2, "6 rollouts/s  120 tokens/s"),
        (8, "- rollouts/s  - tokens/s"),
        (9, "- rollouts/s  - tokens/s"),
    ],
)
def test_rollouts_from_before_a_resume_count_in_no_rate(
    tmp_path: Path, ready: float, rates: str
) -> None:
    """Nor those that were sampled ahead of the step."""
    config = resolve({"name": "r", "output": str(tmp_path), "steps": 9}, source="test")
    row = stepped(4, rollouts=64.0, groups=8.0, groups_ready=ready, tokens_completion=1280.0)
    row.metrics["time/rollouts"] = 8.0 if ready < 8 else 0.004
    line = Progress(config, [row]).line(row)
    assert f"  {rates}  " in line


def said_until(word: str, done: asyncio.Event) -> io.StringIO:
    """A console's file that tells when the word is printed."""

    class Said(io.StringIO):
        def write(self, text: str) -> int:
            if word in text:
                done.set()
            return super().write(text)

    return Said()


async def test_lines_are_in_the_order_of_their_times(tmp_path: Path) -> None:
    """ "scoring" is logged after the last step has ended, and before the score: whichever is read
    first, it stands between them."""
    config = resolve({"name": "r", "output": str(tmp_path), "steps": 1}, source="test")
    done, file = asyncio.Event(), tmp_path / "algorithm.log"
    console = Console(file=said_until("after step 1", done), width=100)
    follower = LogFollower(console, PHASE, [file])
    async with open_store(config.store) as store:
        await store.open_run("r", {})
        base: Any = {"run": "r", "epoch": 1, "groups": [], "versions": {}, "checkpoint": None}
        await store.commit_step(StepCommit(**base, step=0, metrics={"reward/mean": 0.5}))
        logged = datetime.now().isoformat(" ", "milliseconds").replace(".", ",")
        file.write_text(f"{logged} PHASE agentrl.algorithm: scoring\n")
        await asyncio.sleep(0.01)  # an evaluation takes longer
        await store.log("r", 1, {"eval/score": 0.5})
        followers = [show_progress(store, config, console, first=follower.look), follower.follow()]
        tasks = [asyncio.create_task(work) for work in followers]
        async with asyncio.timeout(60):
            await done.wait()
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
    assert isinstance(console.file, io.StringIO)
    said = console.file.getvalue()
    assert said.index("step 1/1") < said.index("scoring") < said.index("after step 1")


async def test_what_a_process_says_comes_before_what_the_store_has_of_it(tmp_path: Path) -> None:
    """The log says "scoring", the store the score: both are there at the next look."""
    config = resolve({"name": "r", "output": str(tmp_path), "steps": 2}, source="test")
    done, file = asyncio.Event(), tmp_path / "algorithm.log"

    console = Console(file=said_until("held-out", done), width=100)
    follower = LogFollower(console, PHASE, [file])
    async with open_store(config.store) as store:
        await store.open_run("r", {})
        file.write_text("2026-01-01 00:00:00,000 PHASE agentrl.algorithm: scoring\n")
        await store.log("r", 0, {"eval/score": 0.5})
        showing = asyncio.create_task(show_progress(store, config, console, first=follower.look))
        async with asyncio.timeout(60):
            await done.wait()
        showing.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await showing
    assert isinstance(console.file, io.StringIO)
    said = console.file.getvalue()
    assert said.index("scoring") < said.index("held-out")


def test_the_time_left_counts_each_step_and_each_evaluation_that_is_due(tmp_path: Path) -> None:
    tables = {"steps": 10, "eval": {"every": 5}}
    config = resolve({"name": "r", "output": str(tmp_path)} | tables, source="test")
    first = stepped(0, time_rollouts=60.0, time_eval=30.0)  # it waits for the agents
    rows = [first, *(stepped(step, time_rollouts=2.0) for step in range(1, 5))]
    evaluated = [*rows, stepped(5, committed=False, time_eval=4.0)]
    assert Progress(config, evaluated).seconds_left() == 5 * 2 + 4
    assert Progress(config, rows).seconds_left() == 5 * 2 + 2 * 30  # also that after step 5
    assert Progress(config, []).seconds_left() is None
    assert [duration_text(x) for x in (7.4, 119, 130, 7300, 9e4, 5.4e6)] == [
        "7 s",
        "119 s",
        "2 min",
        "2 h",
        "25 h",
        "62 days",
    ]


async def test_an_evaluation_alone_says_of_no_policy_that_it_is_untrained(tmp_path: Path) -> None:
    """`agentrl eval` scores a checkpoint, in a run without steps."""
    config = resolve({"name": "r", "output": str(tmp_path), "steps": 0}, source="test")
    console = Console(file=io.StringIO(), width=200)
    rollout = NewRollout(id="0", run="r", group="g", index=0, task={}, purpose=Purpose.EVAL)
    async with open_store(config.store) as store:
        await store.open_run("r", {})
        await store.enqueue([rollout])
        (attempt,) = await store.claim(1, runner="w", lease=60.0, run="r")
        await store.finish([Outcome(attempt=attempt.id, fence=attempt.fence)])
        await store.log("r", 0, {"eval/score": 0.5})
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(0.5):
                await show_progress(store, config, console)
        await print_report(store, config, await store.steps("r"), None, 1.0, console)
    assert isinstance(console.file, io.StringIO)
    said = console.file.getvalue()
    assert "\nheld-out 50.0%\n" in said
    assert "A failure\n" in said
    assert not any(word in said for word in ("untrained", "0 steps"))


def test_the_live_display_fits_into_eighty_columns(tmp_path: Path) -> None:
    config = resolve({"name": "r", "output": str(tmp_path), "steps": 900}, source="test")
    row = stepped(
        0, reward_mean=-12.25, reward_std=10.4, eval_score=0.5, time_rollouts=1000.0,
        time_update=2000.0, policy_entropy=1.25, policy_kl=0.01, policy_grad_norm=12.5,
        time_waiting_for_rollouts=3.0, time_waiting_for_policy=30.0,
    )  # fmt: skip
    progress = Progress(config, [row], Counts(failed=12), ready=True)
    progress.judge()
    written = io.StringIO()
    console = Console(file=written, width=80)
    console.print(progress.table())
    lines = written.getvalue().splitlines()
    assert "step 1/900" in lines[0]
    assert "left" in lines[0]
    assert not [line for line in lines[:3] if "…" in line]
    assert all(len(line.rstrip()) <= 80 for line in lines)
    assert len(lines) == len(progress.table().renderables)


def test_the_first_step_says_how_long_a_step_takes(tmp_path: Path) -> None:
    config = resolve({"name": "r", "output": str(tmp_path), "steps": 9}, source="test")
    times = {"time_rollouts": 1.5, "time_update": 1.0, "time_checkpoint": 0.2}
    rows = [stepped(0, **times), stepped(1, **times)]
    assert "  2.7 s a step" in Progress(config, rows).line(rows[0])
    assert "a step" not in Progress(config, rows).line(rows[1])
