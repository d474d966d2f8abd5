"""With `eval.concurrent` training goes on while copies of policies are scored; no score is lost."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from agentrl.core.config import RunConfig, resolve
from agentrl.core.errors import ConfigError
from agentrl.core.types import Attempt, Purpose
from agentrl.store import open_store
from tests.system import steady
from tests.system.steady import STEPS


def config(folder: Path, model: Path) -> RunConfig:
    made = steady.config(folder, model)
    return replace(
        made,
        tasks=replace(made.tasks, heldout="tasks.jsonl"),
        eval=replace(made.eval, every=2, concurrent=True, sampled=False),
    )


class Agents:
    """They play held-out tasks between the first and the last step only when training is further
    on, and tell who was asked for."""

    def __init__(self) -> None:
        self.tasks: set[asyncio.Task[None]] = set()
        self.asked: dict[int, set[str]] = {}
        self.committed_meanwhile: dict[int, int] = {}

    async def __call__(self, settings: RunConfig) -> None:
        async with open_store(settings.store) as store:
            while True:
                found = await store.claim(8, runner="r", lease=1.0, timeout=5.0)
                for attempt in found:
                    self.tasks.add(asyncio.create_task(self.play(store, attempt)))

    async def play(self, store: Any, attempt: Attempt) -> None:
        row = attempt.rollout
        if row.purpose is Purpose.EVAL:
            self.asked.setdefault(row.step, set()).add(row.seats.get("policy", ""))
        while row.purpose is Purpose.EVAL and 0 < row.step < STEPS:
            state = await store.run("steady")
            if state.step >= row.step + 1:
                self.committed_meanwhile[row.step] = state.step
                break
            await store.heartbeat([attempt.id], lease=1.0)
            await asyncio.sleep(0.02)
        calls, outcome = steady.played(attempt, ["policy"])
        await store.add_transitions(calls)
        await store.finish([outcome])


async def scores(folder: Path) -> dict[int, float]:
    async with open_store(f"sqlite:///{folder / 'out' / 'store.db'}") as store:
        rows = await store.steps("steady")
        return {row.step: row.metrics["eval/score"] for row in rows if "eval/score" in row.metrics}


def test_training_goes_on_and_a_killed_evaluation_is_ended_by_the_next_process(
    tmp_path: Path, tiny_model_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    agents = Agents()
    monkeypatch.setattr(steady, "answer", agents)
    settings = config(tmp_path, tiny_model_dir)
    steady.break_off(settings, "checkpoint", number=3)  # as the policy after two steps is scored
    assert set(asyncio.run(scores(tmp_path))) == {0}
    assert [path.name for path in (tmp_path / "out" / "evaluation").iterdir()] == ["000002"]
    steady.finish(settings)
    assert set(asyncio.run(scores(tmp_path))) == {0, 2, 4, STEPS}
    assert agents.asked == {0: {""}, 2: {"policy@heldout2"}, 4: {"policy@heldout4"}, STEPS: {""}}
    assert agents.committed_meanwhile[2] > 2
    assert agents.committed_meanwhile[4] > 4
    assert not list((tmp_path / "out" / "evaluation").iterdir())


def test_it_is_refused_where_nothing_is_scored_between() -> None:
    with pytest.raises(ConfigError, match=r"eval.concurrent scores copies"):
        resolve({"name": "r", "eval": {"concurrent": True}}, source="test")
