"""Players that do not learn play real games, through gateway, runner and store."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import openai

import agentrl
from agentrl.config import resolve
from agentrl.config.policies import FrozenPolicy
from agentrl.evaluation.plans.plan import EvaluationPlan
from agentrl.evaluation.plans.process import play_plan
from agentrl.runners.main import RunnerThread
from agentrl.store import open_store


def team_of_two() -> Any:
    async def agent(value: str) -> str:
        said = []
        async with openai.AsyncOpenAI() as client:
            for name in ("first", "second"):
                with agentrl.role(name):
                    answer = await client.chat.completions.create(
                        model="m", messages=[{"role": "user", "content": value}]
                    )
                said.append(answer.choices[0].message.content or "")
        return " ".join(said)

    return agent


async def test_lineups_are_played_once(tmp_path: Path, tiny_model_dir: Path) -> None:
    config = resolve(
        {
            "name": "games",
            "output": str(tmp_path),
            "store": f"sqlite:///{tmp_path / 'store.db'}",
            "steps": 0,
            "policy": {"model": str(tiny_model_dir), "lora": {"rank": 2}},
            "sampling": {"max_tokens": 4},
        },
        source="test",
    )
    first = FrozenPolicy(policy="policy", directory="", steps=0)
    seats = {"first": "policy", "second": "policy@000000"}
    plan = EvaluationPlan(
        players={"policy@000000": first},
        lineups={"team": {}, "second=policy@000000": seats},
        tasks=[{"input": "Oslo"}, {"input": "Lima"}],
        temperature=1.0,
        steps=7,
    )
    runner = RunnerThread(
        config.store, config.name, agent=team_of_two, verifier=lambda task, result: 1.0
    )
    runner.start()
    try:
        async with asyncio.timeout(120):
            await play_plan(config, plan)
            async with open_store(config.store) as store:
                before = await store.rollouts(config.name)
            await play_plan(config, plan)
    finally:
        await asyncio.to_thread(runner.stop)
    async with open_store(config.store) as store:
        after = await store.rollouts(config.name)
        traces = {row.id: await store.trace(row.id) for row in after}
    assert [row.attempt for row in after] == [row.attempt for row in before]
    assert [row.reward() for row in after] == [1.0] * 4
    players = {
        row.group.rpartition("/")[2]: [
            (call.role, call.policy, call.version) for call in traces[row.id].transitions
        ]
        for row in after
    }
    assert players == {
        "team": [("first", "policy", 7), ("second", "policy", 7)],
        "second=policy@000000": [("first", "policy", 7), ("second", "policy@000000", 0)],
    }
    assert {row.group.rpartition("/")[2]: row.seats for row in after} == plan.lineups
