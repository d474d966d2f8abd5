"""What a report draws."""

from __future__ import annotations

import io
import time
from math import nan
from pathlib import Path
from typing import Any

import msgspec
import pytest
from rich.console import Console

from agentrl.core.config import resolve
from agentrl.core.types import (
    ErrorKind,
    Failure,
    NewRollout,
    Outcome,
    Purpose,
    Reward,
    Rollout,
    StepRow,
)
from agentrl.store import open_store
from agentrl.telemetry import report
from agentrl.telemetry.report import (
    policies_without_calls,
    print_report,
    reward_curves,
    save_curve,
    score_table,
    times,
)
from tests.factories import rollout


def row(step: int, **metrics: float) -> StepRow:
    return StepRow(run="run", step=step, metrics=metrics, committed=True, at=0.0)


def test_each_role_has_a_curve_of_its_own() -> None:
    steps = [
        row(0, **{"reward/mean": 0.5, "role/planner/reward": 0.25, "role/a/b/reward": 1.0}),
        row(1, **{"reward/mean": 0.5, "role/a/b/reward": 0.0, "role/planner/tokens": 9.0}),
    ]
    assert reward_curves(steps) == {"planner": [(0, 0.25)], "a/b": [(0, 1.0), (1, 0.0)]}
    assert reward_curves([row(0, **{"reward/mean": 0.5})]) == {}


def test_held_out_scores_of_roles_are_shown_under_those_of_all() -> None:
    before = {
        "eval/score": 1.5,
        "eval/score_missing": 2.0,
        "eval/score/b": 3.0,
        "eval/sampled": 2.5,
    }
    after = {"eval/score": 0.5, "eval/score/a": 0.25, "eval/score/b": 4.5, "eval/sampled": 3.5}
    table = score_table([row(0, **before), row(7, **after)])
    assert list(zip(*(column.cells for column in table.columns), strict=True)) == [
        ("score", "1.5", "0.5"),
        ("  a", "-", "0.25"),
        ("  b", "3", "4.5"),
        ("  without a score", "2", "0"),
        ("sampled", "2.5", "3.5"),
    ]


def test_scores_have_their_interval_and_pass_at_k_rises_with_k() -> None:
    known = {"eval/sampled": 0.25, "eval/sampled_low": 0.2, "eval/sampled_high": 0.3}
    known |= {f"eval/sampled/pass@{k}": k / 16 for k in (1, 2, 16)}
    table = score_table([row(0, **known)])
    names, values = (list(column.cells) for column in table.columns)
    assert names == ["sampled", "  pass@1", "  pass@2", "  pass@16"]
    assert values == ["25.0% (20.0% to 30.0%)", "6.2%", "12.5%", "100.0%"]
    mean = score_table(
        [row(0, **{"eval/score": -1.5, "eval/score_low": -2, "eval/score_high": -1})]
    )
    assert list(mean.columns[1].cells) == ["-1.5 (-2 to -1)"]


def evaluated(low: float, score: float, high: float) -> dict[str, float]:
    return {"eval/score": score, "eval/score_low": low, "eval/score_high": high}


@pytest.mark.parametrize(
    ("training", "outcomes", "percent"),
    [
        ({}, [], True),
        ({"reward/mean": 0.9, "reward/std": 0.3}, [0.0, 1.0, nan], True),
        ({"eval/score_low": -0.1}, [], False),
        ({"eval/score/b": 1.5}, [], False),
        ({"reward/mean": -0.2}, [], False),
        ({"reward/mean": 0.5, "reward/std": 0.8}, [], False),  # of -1 and 1
        ({}, [1.0, -1.0], False),
    ],
)
def test_a_table_is_in_percent_only_if_no_outcome_lies_outside(
    training: dict[str, float], outcomes: list[float], percent: bool
) -> None:
    steps = [row(0, **evaluated(0.1, 0.25, 0.4) | training), row(9, **evaluated(0.7, 0.852, 0.95))]
    _, before, after = score_table(steps, outcomes).columns
    known = [cell for cell in (*before.cells, *after.cells) if cell != "-"]
    assert {"%" in cell for cell in known} == {percent}
    expected = "85.2% (70.0% to 95.0%)" if percent else "0.852 (0.7 to 0.95)"
    assert next(iter(after.cells)) == expected


async def test_the_report_of_an_evaluation_reads_its_outcomes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = resolve({"name": "run", "output": str(tmp_path)}, source="test")
    console = Console(file=io.StringIO(), width=100)
    async with open_store(f"sqlite:///{tmp_path / 'store.db'}") as store:
        await store.open_run("run", {})
        await store.log("run", 0, evaluated(0.1, 0.5, 0.9))

        async def rollouts(*args: Any, **given: Any) -> list[Rollout]:
            return [rollout(rewards=[Reward(value=value)]) for value in (-1.0, 1.0)]

        monkeypatch.setattr(store, "rollouts", rollouts)
        await print_report(store, config, await store.steps("run"), None, 1.0, console)
    assert "0.5 (0.1 to 0.9)" in console.file.getvalue()  # type: ignore[attr-defined]


def test_the_seconds_of_this_start_add_up() -> None:
    """Not with those of an earlier one, which this has resumed."""
    spent = {"time/rollouts": 2.4, "time/update": 1.4, "time/eval": 1.3}
    rows = [row(step, **spent) for step in range(4)]
    rows = [*rows[:2], *(msgspec.structs.replace(each, at=time.time()) for each in rows[2:])]
    said = times(resolve({}, source="test"), rows, 14.4)
    assert said == "14 s: 3 start-up, 5 rollouts, 3 updates, 3 evaluation"


def test_without_held_out_tasks_there_is_no_table() -> None:
    assert score_table([row(0, **{"reward/mean": 0.5}), row(1)]).row_count == 0


def test_a_policy_whose_roles_never_speak_is_named() -> None:
    members = {name: {"roles": [name], "model": name} for name in ("solver", "planer", "late")}
    members["judge"] = {"roles": ["judge"], "frozen": True, "model": "m"}
    config = resolve({"policy": {"model": "m"}, "policies": members}, source="test")
    spoken = {"role/solver/reward": 1.0, "role/planner/reward": 1.0}
    steps = [
        row(0, **spoken, **{"solver/calls": 0.0, "planer/calls": 0.0}),
        row(1, **spoken, **{"solver/calls": 3.0, "planer/calls": 0.0}),
    ]
    assert policies_without_calls(config, steps) == {
        "planer": "the policy 'planer' has learned nothing: no call was made in its roles "
        "('planer'); the roles with calls are 'planner', 'solver'"
    }
    assert policies_without_calls(resolve({}, source="test"), [row(0, calls=0.0)]) == {}


async def test_failures_of_a_start_that_ended_with_them_are_not_counted_later(
    tmp_path: Path,
) -> None:
    config = resolve({"name": "a.1", "output": str(tmp_path)}, source="test")
    async with open_store(config.store) as store:
        await store.open_run("a.1", {})
        for trial, failures in (("score", 2), ("score.01", 2), ("score.02", 1)):
            group = f"a.1/eval/000000/{trial}"
            new: Any = {"run": "a.1", "group": group, "task": {}, "purpose": Purpose.EVAL}
            await store.enqueue([NewRollout(id=f"{group}/{i}", index=i, **new) for i in range(2)])
            for one in await store.claim(2, runner="w", lease=60.0, run="a.1"):
                failed = one.rollout.index < failures
                why = Failure(kind=ErrorKind.AGENT, message=trial) if failed else None
                done = Outcome(attempt=one.id, fence=one.fence, failure=why)
                await store.finish([done])
        said = await report._failures(store, config)
    assert said == "1 rollout failed (1 agent_error); the last one: score.02"


@pytest.mark.parametrize(
    ("scores", "said"),
    [
        ([0.27, 0.02, 0.01], " (after step 1: 2.0%, below the untrained policy's 27.0%)"),
        ([0.27, 0.3], ""),
        ([0.27], ""),
    ],
)
def test_a_best_checkpoint_below_the_untrained_is_named(scores: list[float], said: str) -> None:
    steps = [row(step, **{"eval/score": score}) for step, score in enumerate(scores)]
    assert report.below_untrained(steps) == said


# -- what the picture of a learning curve shows ----------------------------------------------------


@pytest.mark.parametrize(
    ("temperature", "tasks", "label"),
    [(0.0, 200.0, "held-out, greedy, 200 tasks"),
     (0.7, None, "held-out, at temperature 0.7")],
)  # fmt: skip
def test_the_curve_says_how_it_was_measured_and_begins_at_the_first_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, temperature: float, tasks: float, label: str
) -> None:
    from matplotlib import pyplot as plt

    kept: list[Any] = []
    monkeypatch.setattr(plt, "close", kept.append)
    how = {"eval": {"temperature": temperature}}
    config = resolve({"name": "run", "output": str(tmp_path)} | how, source="test")
    known = {} if tasks is None else {"eval/tasks": tasks}
    steps = [
        row(0, **{"reward/mean": 0.25, "role/a/reward": 0.2, "eval/score": 0.1} | known),
        row(1, **{"reward/mean": 0.5, "role/a/reward": 0.4}),
        row(2, **{"eval/score": 0.6}),
    ]
    save_curve(config, steps)
    lines = {line.get_label(): list(line.get_xdata()) for line in kept[0].axes[0].lines}
    assert lines[label] == [0, 2]
    assert [xs for name, xs in lines.items() if name != label] == [[1, 2], [1, 2]]
