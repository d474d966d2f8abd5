"""The team's parts agree with each other, and two adapters learn from what it does."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from agentrl.core.types import RolloutState, Transition
from agentrl.store import open_store
from tests import factories
from tests.examples.parts import modules, train_once

Parts = dict[str, ModuleType]


@pytest.fixture(scope="module")
def team() -> Iterator[Parts]:
    pytest.importorskip("langgraph")
    with modules("team", "agent", "data", "policy", "tasks", "verifier") as parts:
        yield parts


def call(role: str, asked: str, said: str) -> Transition:
    answer, messages = {"role": "assistant", "content": said}, [{"role": "user", "content": asked}]
    return factories.call(prompt=(), completion=(), role=role, messages=messages, answer=answer)


def test_plans_lead_to_answers(team: Parts) -> None:
    for task in team["tasks"].heldout[::40]:
        found, _, columns = task["plan"].partition(": ")
        for column in columns.split(", "):
            tables = [t for t, rows in team["data"].TABLES.items() if found in rows]
            (table,) = tables
            found = team["agent"].look_up(f"SELECT {column} FROM {table} WHERE name = '{found}'")
        assert found == task["answer"]
    assert team["agent"].look_up("SELECT") == "error"
    assert team["agent"].look_up("DELETE FROM people") == "error"
    assert team["agent"].look_up("SELECT name FROM people WHERE name = 'x'") == "nothing"


def test_heldout_people_are_not_asked_about_in_training(team: Parts) -> None:
    train, heldout = (
        {t["plan"].partition(":")[0] for t in split}
        for split in (team["tasks"].train, team["tasks"].heldout)
    )
    assert train
    assert heldout
    assert not train & heldout


def test_each_call_is_judged_by_its_own_part(team: Parts) -> None:
    part, task = team["verifier"].did_its_part, team["tasks"].train[1]
    plan, question = task["plan"], task["input"]
    assert part(call("planner", question, plan), plan) is True
    assert part(call("planner", question, f"{plan}, city"), plan) is False
    assert part(call("critic", f"{question} {plan}", "accept"), plan) is True
    assert part(call("critic", f"{question} {plan}, city", "accept"), plan) is False
    assert part(call("critic", f"{question} {plan}, city", "revise"), plan) is True
    sql = "SELECT {} FROM {} WHERE name = 'sales'"
    assert part(call("solver", "city of sales", sql.format("city", "teams")), plan) is True
    assert part(call("solver", "city of sales", sql.format("city", "people")), plan) is False
    assert part(call("solver", "country of sales", "anything"), plan) is None


def test_demonstrations_are_what_the_agent_asks(team: Parts) -> None:
    policy, agent, dice = team["policy"], team["agent"], random.Random(0)
    for _ in range(20):
        assert policy.planner(dice)[0]["content"] == agent.PLANNER.text
        question, verdict = policy.critic(dice)[1:]
        assert "? " in question["content"]
        assert verdict["content"] in ("accept", "revise")
        step, sql = policy.solver(dice)[1:]
        assert sql["content"].startswith(f"SELECT {step['content'].partition(' of ')[0]} FROM ")


async def test_nodes_are_played_by_their_policies(run_example: Any, team: Parts) -> None:
    plans = {task["input"]: task["plan"] for task in team["tasks"].train}

    def answer(body: dict[str, Any]) -> dict[str, Any]:
        system, asked = (body["messages"][at]["content"] for at in (0, 1))
        if system == team["agent"].PLANNER.text:
            again = body["messages"][-1]["content"] == "revise"
            return {"content": plans[asked] if again else "nobody: nothing"}
        if system == team["agent"].CRITIC.text:
            return {"content": "revise" if "nobody" in asked else "accept"}
        column, _, name = asked.partition(" of ")
        (table,) = (t for t, rows in team["data"].TABLES.items() if name in rows)
        return {"content": f"SELECT {column} FROM {table} WHERE name = '{name}'"}

    for trace in await run_example("team", answer):
        assert trace.rollout.reward() == 1.0
        played = [(c.role, c.policy) for c in trace.transitions]
        reader = [("planner", "reader"), ("critic", "reader")]
        assert played[:4] == reader * 2
        assert set(played[4:]) == {("solver", "writer")}
        parts = [row.value for row in trace.rollout.rewards if row.name == "part"]
        assert parts == [0.0] + [1.0] * (len(played) - 1)


async def test_two_adapters_learn_from_one_team(tmp_path: Path, tiny_model_dir: Path) -> None:
    """What the tiny model says is noise; everything around it is as in any training."""
    pytest.importorskip("langgraph")
    more = ["runner.processes=1", "agent.timeout=300"]
    await train_once("team", tiny_model_dir, tmp_path, *more)
    async with open_store(f"sqlite:///{tmp_path / 'store.db'}") as store:
        rollouts = await store.rollouts("team", step=0)
        assert {rollout.state for rollout in rollouts} == {RolloutState.SUCCEEDED}
        (row,) = [row for row in await store.steps("team") if row.committed]
        assert {"reader/calls", "writer/calls"} <= row.metrics.keys()
    (checkpoint,) = (tmp_path / "checkpoints").glob("0*")
    for policy in ("reader", "writer"):
        assert (checkpoint / policy / "adapter_config.json").is_file()
