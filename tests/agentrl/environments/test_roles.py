"""Several policies by role in an environment: each learns from its own rewards."""

from __future__ import annotations

import asyncio
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from agentrl import Trainer
from agentrl.core.types import Reward, Scope
from agentrl.environments.playing import with_outcome
from agentrl.store import open_store
from tests.agentrl.environments.conftest import HERE


@pytest.mark.slow
@pytest.mark.timeout(240)
def test_rewards_of_a_role_train_the_policy_that_plays_it(
    tiny_model_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    policies = {role: {"roles": [role], "lora": {"rank": 2}} for role in ("black", "white")}
    algorithm: dict[str, Any] = {"preset": "grpo+per-role", "groups": 1, "group_size": 4}
    algorithm |= {"options": {"reward": "role:outcome"}, "lr": 1e-3, "dynamic_sampling": False}
    trainer = Trainer(
        environment="worlds.py:Contest:x", root=str(HERE), policy=tiny_model_dir, name="contest",
        policies=policies, steps=2, algorithm=algorithm, sampling={"max_tokens": 6},
        eval={"every": 0, "tasks": 0}, learner={"threads": 1}, runner={"processes": 1},
    )  # fmt: skip
    result = trainer.fit()

    async def look() -> Any:
        async with open_store(result.store, readonly=True) as store:
            trained = [one for one in await store.rollouts("contest") if "/eval/" not in one.id]
            traces = [await store.trace(one.id) for one in trained]
            return traces, [row for row in await store.steps("contest") if row.committed]

    traces, steps = asyncio.run(look())
    paid = {trace.rollout.group: trace.rollout.task["input"] for trace in traces}
    for trace in traces:
        rows = {row.target: row.value for row in trace.rollout.rewards if row.scope is Scope.ROLE}
        assert rows.keys() == {"black", "white"}
        assert {role for role, value in rows.items() if value} <= {trace.rollout.task["input"]}
        assert {(call.role, call.policy) for call in trace.transitions} == {
            ("black", "black"), ("white", "white")
        }  # fmt: skip
    assert sorted(paid.values()) == ["black", "white"]
    learned = [
        {role for role in ("black", "white") if row.metrics.get(f"{role}/grad_norm", 0) > 0}
        for row in steps
    ]
    assert sorted(map(sorted, learned)) == [["black"], ["white"]]


def test_the_outcome_is_that_of_the_roles_in_which_a_policy_learns() -> None:
    """Else one that plays the second agent of a game would be trained to lose."""
    rows = [Reward(value, scope=Scope.ROLE, target=role) for role, value in (("a", 1.0), ("b", -1))]

    def outcome(a: tuple[str, int | None], b: tuple[str, int | None]) -> float:
        calls: Any = [
            SimpleNamespace(role=role, policy=policy, version=version)
            for role, (policy, version) in (("a", a), ("b", b))
        ]
        first, *others = with_outcome(rows, calls)
        assert others == rows
        return first.value

    assert outcome(("gpt", None), ("policy", 3)) == -1.0
    assert outcome(("policy", 0), ("gpt", None)) == 1.0
    assert outcome(("policy@2", 2), ("policy", 3)) == -1.0
    assert outcome(("policy", 3), ("policy", 3)) == 0.0
    assert outcome(("gpt", None), ("gpt", None)) == 0.0


def test_an_outcome_that_is_given_stays() -> None:
    rows = [Reward(3.0), Reward(1.0, scope=Scope.ROLE, target="black")]
    assert with_outcome(rows, []) == rows
    assert with_outcome(rows[1:], []) == [Reward(1.0), rows[1]]
    assert with_outcome([Reward(1.0, "speed")], []) == [Reward(1.0, "speed")]
