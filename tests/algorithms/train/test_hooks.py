"""The seam of a run: what is optional joins by hooks, and nothing else knows it by name."""

from __future__ import annotations

import ast
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

import agentrl.algorithms
from agentrl.algorithms.credit.peers import no_evidence
from agentrl.algorithms.data.state import StatePart
from agentrl.algorithms.diagnostics.metrics import Metrics
from agentrl.algorithms.objective.core import Algo
from agentrl.algorithms.presets import registry
from agentrl.algorithms.train import saving
from agentrl.algorithms.train.hooks import AllHooks, Hooks, hooks_of
from agentrl.algorithms.train.loop import TrainingLoop
from agentrl.config import RunConfig, resolve
from agentrl.types import Group, NewRollout, Reward, StepReward
from tests import factories
from tests.algorithms.train.test_loop import StandIn

OPTIONAL = {
    "judges", "prompts", "offline", "snapshots", "selfplay", "teacher", "counterfactuals",
}  # fmt: skip


@pytest.mark.parametrize(
    "name", ["main", "stages", "build", "loop", "step", "heldout", "policy_set", "hooks"]
)
def test_what_builds_and_runs_a_step_knows_no_part(name: str) -> None:
    folder = Path(agentrl.algorithms.__file__).parent / "train"
    tree = ast.parse((folder / f"{name}.py").read_text())
    imported = [node.module or "" for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)]
    names = {
        alias.name
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom) and node.module
        for alias in node.names
    }
    words = {word for path in imported for word in path.split(".")}
    assert not (words | names) & OPTIONAL


class Noted(Hooks):
    """Writes down when it is called."""

    def __init__(self, name: str, seen: list[str]) -> None:
        self.name, self.seen = name, seen

    def note(self, what: str) -> None:
        self.seen.append(f"{what} {self.name}")

    def algorithm(self, config: RunConfig, algo: Algo) -> Algo:
        return Algo(algo.credit, rewards=(*algo.rewards, self.name))

    def state(self) -> Mapping[str, StatePart]:
        return {self.name: no_evidence()}

    async def before_step(self, step: int) -> None:
        self.note(f"before {step}")

    async def requested(self, rollouts: Sequence[NewRollout]) -> None:
        self.note(f"requested {len(rollouts)}")

    def claimed(self, groups: Sequence[Group]) -> Metrics:
        return {self.name: float(len(groups))}

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


async def test_the_loop_calls_every_part_in_order(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    seen: list[str] = []
    run: Any = Run(seen)
    monkeypatch.setattr(saving, "save_checkpoint", lambda *given: seen.append("saved"))
    monkeypatch.setattr(saving, "prune", lambda *given, **more: None)
    live = run.served_run(tmp_path, steps=1, eval={"tasks": 7})
    await TrainingLoop(live, run, run, AllHooks(Noted("a", seen), Noted("b", seen))).run()
    assert seen == [
        "evaluate 0 7 a", "evaluate 0 7 b", "before 0 a", "before 0 b", "complete a", "complete b",
        "update a b", "commit 1 a", "commit 1 b", "saved", "committed a b 1",
        "published a", "published b", "evaluate 1 7 a", "evaluate 1 7 b",
    ]  # fmt: skip


async def test_several_parts_are_one() -> None:
    seen: list[str] = []
    parts = AllHooks(Noted("a", seen), Noted("b", seen))
    algo = parts.algorithm(resolve({}, source="test"), registry.make("grpo", {}))
    assert algo.rewards == ("outcome", "a", "b")
    assert parts.state().keys() == {"a", "b"}
    assert parts.claimed([]) == {"a": 0.0, "b": 0.0}
    await parts.requested([])
    assert seen == ["requested 0 a", "requested 0 b"]


JUDGE = {"kind": "pointwise", "upstream": "u", "rubric": "r"}


@pytest.mark.part
@pytest.mark.parametrize(
    ("tables", "expected"),
    [
        ({}, []),
        ({"data": {"name": "pairs"}, "algorithm": {"preset": "dpo"}}, ["DataSet"]),
        ({"tasks": {"order": "difficulty"}}, ["Curriculum"]),
        ({"tasks": {"solved": 0.9}}, ["Curriculum"]),
        ({"selfplay": {"seats": ["x", "o"]}, "algorithm": {"preset": "spiral"}}, ["SelfPlay"]),
        ({"algorithm": {"counterfactual": {"substitutes": {"x": "first"}}}}, ["Counterfactuals"]),
        ({"algorithm": {"branching": {"kind": "mc"}}}, ["Branches"]),
        ({"selfplay": {"seats": ["x", "o"]}, "steps": 0}, []),
        ({"teacher": {"upstream": "u"}, "algorithm": {"preset": "distill"}}, ["Teachers"]),
        ({"judges": {"j": JUDGE}, "tasks": {"solved": 0.9}}, ["Curriculum", "Judged"]),
    ],
)
def test_a_run_has_the_parts_that_its_settings_ask_for(
    tables: dict[str, Any], expected: list[str]
) -> None:
    base: dict[str, Any] = {"policy": {"model": "m"}}
    if "data" not in tables:
        base["upstreams"] = {"u": {"base_url": "http://u/v1", "model": "m"}}
    config = resolve(base | tables, source="test")
    found = [type(part).__name__ for part in hooks_of(config).each]
    found.remove("Preflight")  # it says what any run needs
    found.remove("Records")  # it keeps what the steps of any run computed
    found.remove("RunOrigin")  # it keeps the commit that any run was started from
    found.remove("Looking")  # it watches for calls with images in any run
    if "data" not in tables:
        found.remove("TemplateChecks")  # it watches what the prompts of any run leave out
    assert found == expected
