"""What of the held-out tasks is scored beside training, and after a restart."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from agentrl.algorithms.train import heldout
from agentrl.algorithms.train.heldout import HeldoutEvaluator
from agentrl.config import resolve


async def nothing(*given: Any) -> dict[str, Any]:
    return {}


class Serving:
    """A stand-in for the policy servers."""

    freeze = drop = announce = nothing

    def updating(self) -> Any:
        return nullcontext()


async def test_the_last_policy_is_scored_on_all_tasks_whoever_began(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    scored = []

    async def evaluate(*given: Any) -> None:
        scored.append((given[3], len(given[4])))

    monkeypatch.setattr(heldout, "evaluate_heldout", evaluate)
    monkeypatch.setattr(heldout, "mark_best", nothing)
    settings = {"every": 2, "tasks": 4, "curve_tasks": 1, "beside": True}
    asked = {"name": "r", "output": str(tmp_path), "steps": 4, "eval": settings}
    config = resolve(asked | {"tasks": {"heldout": "t.jsonl"}}, source="test")
    policies: Any = SimpleNamespace(versions=lambda step: {"policy": step})
    prompts: Any = SimpleNamespace(in_use=SimpleNamespace(id=None))
    tasks = [{"id": n} for n in range(9)]
    for steps in (2, 4):  # a killed process began to score these
        (tmp_path / "evaluation" / f"{steps:06d}").mkdir(parents=True)
        serving: Any = Serving()
        evaluator = HeldoutEvaluator(config, serving, 1, "r", policies, serving, tasks, prompts)
        await evaluator.start(steps)
        await evaluator.score(steps)
        await evaluator.finish()
    assert scored == [(2, 1), (4, 4)]
