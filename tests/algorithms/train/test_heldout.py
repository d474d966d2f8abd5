"""What of the held-out tasks is scored beside training, and after a restart."""

from __future__ import annotations

import shutil
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from agentrl.algorithms.sampling.tasks import CandidateInUse
from agentrl.algorithms.train import saving
from agentrl.algorithms.train.saving import HeldoutEvaluator
from agentrl.core.config import resolve
from agentrl.core.files import PARTIAL


async def nothing(*given: Any) -> dict[str, Any]:
    return {}


class Serving:
    """A stand-in for the policy servers."""

    freeze = drop = announce = nothing

    def updating(self) -> Any:
        return nullcontext()


@pytest.fixture
def scored(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """(steps, tasks) of each evaluation."""
    evaluations: list[tuple[int, int]] = []

    async def evaluate(*given: Any) -> None:
        evaluations.append((given[3], len(given[4])))

    monkeypatch.setattr(saving, "evaluate_heldout", evaluate)
    monkeypatch.setattr(saving, "mark_best", nothing)
    return evaluations


def make_evaluator(output: Path) -> HeldoutEvaluator:
    settings = {"every": 2, "tasks": 4, "curve_tasks": 1, "concurrent": True}
    asked = {"name": "r", "output": str(output), "steps": 4, "eval": settings}
    config = resolve(asked | {"tasks": {"heldout": "t.jsonl"}}, source="test")
    policies: Any = SimpleNamespace(versions=lambda step: {"policy": step})
    tasks: Any = [{"id": n} for n in range(9)]
    serving: Any = Serving()
    return HeldoutEvaluator(config, serving, 1, "r", policies, serving, tasks, CandidateInUse())


async def test_the_last_policy_is_scored_on_all_tasks_whoever_began(
    tmp_path: Path, scored: list[tuple[int, int]]
) -> None:
    for steps in (2, 4):  # a killed process began to score these
        (tmp_path / "evaluation" / f"{steps:06d}").mkdir(parents=True)
        evaluator = make_evaluator(tmp_path)
        await evaluator.start(steps)
        await evaluator.score(steps)
        await evaluator.finish()
    assert scored == [(2, 1), (4, 4)]


async def test_a_copy_that_a_killed_process_left_incomplete_is_deleted(
    tmp_path: Path, scored: list[tuple[int, int]]
) -> None:
    folder = tmp_path / "evaluation"
    for name in ("000002", f"000002{PARTIAL}0a1b2c34", f"000003{PARTIAL}0a1b2c3d"):
        (folder / name).mkdir(parents=True)
    evaluator = make_evaluator(tmp_path)
    await evaluator.start(2)
    assert [path.name for path in folder.iterdir()] == ["000002"]
    await evaluator.finish()
    assert scored == [(2, 1)]


@pytest.mark.parametrize("steps", [1, 2])
async def test_a_copy_is_never_left_in_part_under_its_name(
    steps: int, tmp_path: Path, scored: list[tuple[int, int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither one that is scored nor one of a rewound step: the next process would load it."""
    path = tmp_path / "evaluation" / "000002"
    path.mkdir(parents=True)
    monkeypatch.setattr(shutil, "rmtree", lambda path, **_: None)  # killed before it deletes
    evaluator = make_evaluator(tmp_path)
    await evaluator.start(steps)
    await evaluator.finish()
    assert not path.exists()
