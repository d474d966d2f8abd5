"""Plans of evaluations: their runs, their players, and when they have been played."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from agentrl.algorithms.sampling.rollouts import evaluation_rollouts
from agentrl.checkpoints import saved as evaluation
from agentrl.config import RunConfig, resolve
from agentrl.config.policies import FrozenPolicy, initial_version
from agentrl.errors import AgentRLError, ConfigError
from agentrl.evaluation.plans import play
from agentrl.evaluation.plans.plan import EvaluationPlan
from agentrl.store import open_store
from agentrl.types import ErrorKind, Failure, Outcome, Rollout, Sampling
from tests import factories
from tests.agentrl.games import PLAYERS, checkpoint, run_of


def test_players_of_other_runs_and_of_several_policies(tmp_path: Path) -> None:
    other = evaluation.checkpoint_at(checkpoint(tmp_path, "000003", run="rival"))
    config = run_of(tmp_path)
    name, player = play.frozen_policy(config, other, "policy")
    assert (name, player.steps, player.directory) == ("rival-policy@000003", 3, str(other.path))
    team = {"solver": {"roles": ["solver"], "lora": {"rank": 2}}}
    team["planner"] = {"roles": ["planner"], "lora": {"rank": 2}}
    several = run_of(tmp_path, policies=team)
    made = evaluation.checkpoint_at(checkpoint(tmp_path, "000004", policy="solver"))
    name, player = play.frozen_policy(several, made, "solver")
    assert (name, player.directory) == ("solver@000004", str(made.path / "solver"))
    with pytest.raises(ConfigError, match="'planner' is not in it"):
        play.frozen_policy(several, made, "planner")


def test_what_decides_a_game_names_the_evaluation(tmp_path: Path) -> None:
    first, last = (checkpoint(tmp_path, name) for name in ("000001", "000002"))
    player = FrozenPolicy(policy="policy", directory=str(first), steps=1)
    plan = EvaluationPlan(players={"a": player}, lineups={}, tasks=[], temperature=1.0, steps=2)
    of = evaluation.checkpoint_at(last)

    def name(plan: EvaluationPlan = plan, **settings: Any) -> str:
        return play.plan_run(run_of(tmp_path, **settings), of, plan, "crossplay").name

    search = {"reflector": "policy", "algorithm": "apo"}
    same = name()
    assert same == name(runner={"processes": 3}, engine={"max_batch": 2}, steps=9)
    others = [
        name(replace(plan, temperature=0.5)),
        name(sampling={"max_tokens": 3}),
        name(upstreams={"judge": {"base_url": "http://x/v1"}}),
        name(upstreams={"judge": {"base_url": "http://x/v1"}}, roles={"agent": "judge"}),
        name(workspace={"source": "task.files"}),
        name(roles={"match": [{"role": "agent", "model": "small"}]}),
        name(prompts={"directory": "texts", "components": {"a": "a.txt"}, **search}),
        name(judges={"good": {"upstream": "policy"}}),
        name(reward_models={"good": {"model": "m"}}),
    ]
    for weights in (first, last):  # a run that began anew wrote them once more
        file = weights / "config.json"
        before = file.stat().st_mtime_ns
        os.utime(file, ns=(2**62, 2**62))
        others.append(name())
        os.utime(file, ns=(before, before))
    assert name() == same
    assert len({same, *others}) == 1 + len(others)


def test_only_a_fresh_start_plays_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def played(config: RunConfig, plan: EvaluationPlan) -> dict[str, list[Rollout]]:
        return {}

    monkeypatch.setattr(play, "played", played)
    (tmp_path / "tasks.jsonl").write_text('{"input": "x"}\n')
    config = run_of(tmp_path, tasks={"heldout": str(tmp_path / "tasks.jsonl")})
    last = evaluation.checkpoint_at(checkpoint(tmp_path, "000002"))
    plan = EvaluationPlan(players={}, lineups={}, tasks=[], temperature=1.0, steps=2)
    store = Path(play.plan_run(config, last, plan, "ablation").output, "store.db")
    store.parent.mkdir()
    store.touch()
    play.run_plan(config, last, plan, "ablation")
    assert store.exists()
    play.run_plan(config, last, plan, "ablation", fresh=True)
    assert not store.exists()
    assert last.path.is_dir()


async def test_a_plan_has_been_played_when_every_game_has_ended(tmp_path: Path) -> None:
    config = run_of(tmp_path)
    tasks: list[dict[str, Any]] = [{"input": "x"}, {"input": "y"}]
    lineups = {"team": {}, "other": {"left": "a"}}
    plan = EvaluationPlan(players=PLAYERS, lineups=lineups, tasks=tasks, temperature=1.0, steps=2)
    async with open_store(f"sqlite:///{tmp_path / 'store.db'}") as store:
        assert await play.ended(store, config, plan) is None
        await store.open_run(config.name, {})
        for name, seats in lineups.items():
            await store.enqueue(evaluation_rollouts(config, 0, name, tasks, Sampling(), seats))
        attempts = await store.claim(4, runner="test", lease=60.0)
        assert len(attempts) == 4
        for attempt in attempts:
            assert await play.ended(store, config, plan) is None
            await store.finish([Outcome(attempt=attempt.id, fence=attempt.fence)])
        found = await play.ended(store, config, plan)
    assert found is not None
    assert {name: [row.task for row in rows] for name, rows in found.items()} == {
        "team": tasks,
        "other": tasks,
    }


async def test_a_role_that_nobody_has_is_told_from_games_that_fail(tmp_path: Path) -> None:
    config = run_of(tmp_path)
    tasks: list[dict[str, Any]] = [{"input": "x"}, {"input": "y"}]
    failure = Failure(kind=ErrorKind.AGENT, message="it broke")
    async with open_store(f"sqlite:///{tmp_path / 'store.db'}") as store:
        await store.open_run(config.name, {})
        await store.enqueue(evaluation_rollouts(config, 0, "team", tasks, Sampling()))
        first, second = await store.claim(2, runner="test", lease=60.0)
        await store.finish([Outcome(attempt=first.id, fence=first.fence, failure=failure)])
        rows = await store.rollouts(config.name)
        said = "team: every rollout failed, 1 of 1 failed by agent_error: it broke"
        with pytest.raises(AgentRLError, match=said):
            await play.check_heard(store, "team", rows[:1], {"left": "a"})
        call = factories.call("call", attempt=second.id, role="left")
        await store.add_transitions([call])
        await store.finish([Outcome(attempt=second.id, fence=second.fence)])
        rows = await store.rollouts(config.name)
        await play.check_heard(store, "team", rows, {"left": "a"})
        with pytest.raises(ConfigError, match="nobody plays the role 'right' in team"):
            await play.check_heard(store, "team", rows, {"left": "a", "right": "b"})


def test_the_first_version_is_what_training_began_with(tmp_path: Path) -> None:
    started = tmp_path / "start"
    started.mkdir()
    whole = run_of(tmp_path, policy={"model": str(started)})
    assert initial_version(whole, "policy")[1].directory == str(started)
    fresh = run_of(tmp_path, policy={"model": "hub/name", "lora": {"rank": 2}})
    name, player = initial_version(fresh, "policy")
    assert (name, player.directory, player.steps) == ("policy@000000", "", 0)
    hub = run_of(tmp_path, policy={"model": "hub/name"})
    assert initial_version(hub, "policy")[1].directory == "hub/name"


def test_tasks_are_those_held_out_or_else_those_of_training(tmp_path: Path) -> None:
    for name in ("train", "heldout"):
        rows = [json.dumps({"input": f"{name} {number}"}) for number in range(3)]
        (tmp_path / f"{name}.jsonl").write_text("\n".join(rows))
    both = {name: f"{name}.jsonl" for name in ("train", "heldout")}

    def inputs(tasks: dict[str, str], limit: int = 0) -> list[object]:
        config = resolve({"root": str(tmp_path), "tasks": tasks}, source="test")
        return [task["input"] for task in play.tasks_of(config, limit)]

    assert inputs(both) == ["heldout 0", "heldout 1", "heldout 2"]
    assert inputs({"train": both["train"]}, 2) == ["train 0", "train 1"]
    with pytest.raises(ConfigError, match="there is nothing to play"):
        inputs({})
