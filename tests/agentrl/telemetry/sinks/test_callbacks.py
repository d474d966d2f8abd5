"""The callbacks of a `Trainer`."""

from __future__ import annotations

from pathlib import Path

import pytest

from agentrl.core.errors import AgentRLError, TrainingError
from agentrl.core.types import StepRow
from agentrl.store import open_store
from agentrl.store.base import Store
from agentrl.telemetry.sinks import Followers, check_callbacks
from tests import factories


class Watch:
    """Notes its calls, and fails at a step."""

    def __init__(self, fails: int = -1) -> None:
        self.fails, self.steps, self.scores = fails, list[int](), list[tuple[int, float]]()

    def on_step(self, row: StepRow) -> None:
        if row.step == self.fails:
            raise ZeroDivisionError("no rollouts\nat all")
        self.steps.append(row.step)

    def on_evaluation(self, row: StepRow) -> None:
        self.scores.append((row.step, row.metrics["eval/score"]))


class OnlyScores:
    def __init__(self) -> None:
        self.seen: list[int] = []

    def on_evaluation(self, row: StepRow) -> None:
        self.seen.append(row.step)


async def steps(store: Store, epoch: int, first: int, end: int) -> None:
    for step in range(first, end):
        await store.commit_step(factories.commit(step, epoch=epoch, metrics={"loss": 1.0}))


async def test_callbacks_see_each_new_step_and_evaluation_once_and_in_order(tmp_path: Path) -> None:
    watch, scores = Watch(), OnlyScores()
    async with open_store(f"sqlite:///{tmp_path / 'store.db'}") as store:
        state = await store.open_run("r", {})
        await steps(store, state.epoch, 0, 2)
        await store.log("r", 0, {"eval/score": 0.1})
        new = Followers(store, "r", [watch, scores])
        await new.call()  # a resumed run
        assert (watch.steps, watch.scores) == ([], [])
        await steps(store, state.epoch, 2, 4)
        await store.log("r", 4, {"eval/score": 0.5})
        await new.call()
        await new.call()
        await store.log("r", 5, {"eval/score": 0.7})
        await store.log("r", 9, {"note": 1.0})
        await new.call()
    assert watch.steps == [2, 3]
    assert watch.scores == [(4, 0.5), (5, 0.7)]
    assert scores.seen == [4, 5]


async def test_an_error_in_a_callback_is_a_sentence_that_ends_the_run(tmp_path: Path) -> None:
    watch = Watch(fails=1)
    async with open_store(f"sqlite:///{tmp_path / 'store.db'}") as store:
        state = await store.open_run("r", {})
        new = Followers(store, "r", [watch])
        await new.call()
        await steps(store, state.epoch, 0, 3)
        message = "Watch.on_step raised ZeroDivisionError at step 2: no rollouts at all; training"
        with pytest.raises(TrainingError, match=message):
            await new.follow()
    assert watch.steps == [0]


def test_an_object_that_nothing_would_call_is_refused() -> None:
    with pytest.raises(AgentRLError, match="neither on_step nor on_evaluation"):
        check_callbacks([print])
