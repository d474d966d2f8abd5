"""What is optional in a run: which features it has, and when the loop calls them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from agentrl.algorithm_process import added_features
from agentrl.algorithms.train import saving
from agentrl.algorithms.train.features import Feature
from agentrl.algorithms.train.loop import TrainingLoop
from agentrl.algorithms.train.main import features_of
from agentrl.algorithms.train.metrics import Metrics
from agentrl.core.config import resolve
from agentrl.core.types import Group, Reward, StepReward
from tests import factories
from tests.algorithms.train.test_loop import StandIn


class Noted(Feature):
    """Writes down when it is called."""

    def __init__(self, name: str, seen: list[str]) -> None:
        self.name, self.seen = name, seen

    def note(self, what: str) -> None:
        self.seen.append(f"{what} {self.name}")

    async def before_step(self, step: int) -> None:
        self.note(f"before {step}")

    async def complete(self, groups: list[Group]) -> tuple[list[Group], Metrics]:
        self.note("complete")
        return [*groups, factories.group(id=self.name)], {f"complete/{self.name}": 1.0}

    async def before_commit(self, steps: int) -> list[StepReward]:
        self.note(f"commit {steps}")
        return [StepReward(rollout=self.name, reward=Reward(value=1.0))]

    async def published(self) -> None:
        self.note("published")

    async def evaluate(self, step: int, limit: int) -> None:
        self.note(f"evaluate {step} {limit}")


class Run(StandIn):
    """Writes down what it trains and commits."""

    def __init__(self, seen: list[str]) -> None:
        self.seen = seen

    def update(self, step: int, groups: list[Any]) -> Metrics:
        self.seen.append("update " + " ".join(group.id for group in groups))
        return super().update(step, groups)

    async def commit_step(self, commit: Any) -> None:
        rewarded = " ".join(row.rollout for row in commit.rewards)
        self.seen.append(f"committed {rewarded} {commit.metrics['complete/b']:g}")


async def test_the_loop_calls_every_feature_in_order(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    seen: list[str] = []
    run: Any = Run(seen)
    monkeypatch.setattr(saving, "save_checkpoint", lambda *given: seen.append("saved"))
    monkeypatch.setattr(saving, "prune", lambda *given, **more: None)
    live = run.served_run(tmp_path, steps=1, eval={"tasks": 7})
    await TrainingLoop(live, run, run, [Noted("a", seen), Noted("b", seen)]).run()
    assert seen == [
        "evaluate 0 7 a", "evaluate 0 7 b", "before 0 a", "before 0 b", "complete a", "complete b",
        "update a b", "commit 1 a", "commit 1 b", "saved", "committed a b 1",
        "published a", "published b", "evaluate 1 7 a", "evaluate 1 7 b",
    ]  # fmt: skip


JUDGE = {"kind": "pointwise", "upstream": "u", "rubric": "r"}


@pytest.mark.parametrize(
    ("tables", "expected"),
    [
        ({}, []),
        ({"data": {"name": "pairs"}, "algorithm": {"preset": "dpo"}}, ["DataSet"]),
        ({"tasks": {"order": "difficulty"}}, ["Curriculum"]),
        ({"tasks": {"order": "unsolved"}}, ["Curriculum"]),
        ({"eval": {"functions": ["mine.py:size"]}}, ["EvalFunctions"]),
        ({"selfplay": {"seats": ["x", "o"]}, "algorithm": {"preset": "spiral"}}, ["SelfPlay"]),
        ({"algorithm": {"counterfactual": {"substitutes": {"x": "first"}}}}, ["Replays"]),
        ({"algorithm": {"branching": {"kind": "mc"}}}, ["Replays"]),
        ({"selfplay": {"seats": ["x", "o"]}, "steps": 0}, []),
        ({"judges": {"j": JUDGE}, "tasks": {"order": "unsolved"}}, ["Curriculum", "JudgeRewards"]),
    ],
)
def test_a_run_has_the_features_that_its_settings_ask_for(
    tables: dict[str, Any], expected: list[str]
) -> None:
    base: dict[str, Any] = {"policy": {"model": "m"}}
    if "data" not in tables:
        base["upstreams"] = {"u": {"base_url": "http://u/v1", "model": "m"}}
    config = resolve(base | tables, source="test")
    found = [type(feature).__name__ for feature in features_of(config)]
    if "data" not in tables:
        found.remove("TemplateChecks")  # it watches what the prompts of any run leave out
        found.remove("HackSigns")  # it watches what any run is paid for
    assert found == expected


def test_a_data_set_is_read_after_features_of_the_updater() -> None:
    config = resolve(
        {"policy": {"model": "m"}, "data": {"name": "d"}, "algorithm": {"preset": "dpo"}},
        source="test",
    )
    found = [type(feature).__name__ for feature in features_of(config, added_features(config))]
    assert found == ["RunOrigin", "ImageTextPolicies", "DataSet"]
