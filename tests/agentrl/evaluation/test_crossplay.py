"""Who beats whom: from rollouts to numbers."""

from __future__ import annotations

import asyncio
import io
import json
import os
from math import isnan, nan
from pathlib import Path
from typing import Any

import openai
import pytest
from msgspec.structs import replace
from rich.console import Console

import agentrl
from agentrl import crossplay
from agentrl import trainer as evaluation
from agentrl.algorithms.sampling.tasks import evaluation_rollouts
from agentrl.core.config import RunConfig, resolve
from agentrl.core.config.derived import FrozenPolicy, initial_version
from agentrl.core.errors import AgentRLError, ConfigError
from agentrl.core.types import ErrorKind, Failure, Outcome, Rollout, RolloutState, Sampling
from agentrl.crossplay import EvaluationPlan, play_plan
from agentrl.runners.main import RunnerThread
from agentrl.store import open_store
from tests import factories
from tests.agentrl.evaluation.games import PLAYERS, ROLES, checkpoint, game, run_of


def test_everybody_plays_everybody_in_every_seat_once() -> None:
    two = crossplay.schedule("abc", ROLES)
    assert len(two) == 6
    assert {"first": "a", "second": "c"} in two.values()
    three = crossplay.schedule("ab", ["x", "y", "z"])
    assert len(three) == 6  # one against the two others, in each seat
    assert {"x": "b", "y": "a", "z": "a"} in three.values()


def test_the_matrix_is_of_both_seats() -> None:
    played = {
        "first=a,second=b": [game(2.0, -2.0), game(0.0, 0.0)],
        "first=b,second=a": [game(1.0, -1.0), game(-1.0, 1.0)],
    }
    assert crossplay.schedule("ab", ROLES).keys() == played.keys()
    found = crossplay.matrix(list(PLAYERS), ROLES, played)
    (_, there), (back, _) = found.meetings
    assert (there.games, there.mean, there.score) == (4, 0.5, 2.5)
    assert (back.games, back.mean, back.score) == (4, -0.5, 1.5)
    assert there.error == pytest.approx(back.error)
    assert there.error == pytest.approx((5 / 3) ** 0.5 / 2)  # 2, 0, -1, 1
    assert found.meetings[0][0] is None
    assert found.ratings[0] == pytest.approx(-found.ratings[1])
    assert found.ratings[0] > 0


def test_games_without_a_return_are_counted_apart() -> None:
    rows = [game(1.0, -1.0), game(1.0), game(3.0, nan), game(3.0, 0.0, state=RolloutState.FAILED)]
    met = crossplay.matchup([("first", row) for row in rows], ROLES)
    assert (met.games, met.missing, met.mean, met.score) == (1, 3, 1.0, 1.0)
    assert isnan(met.error)
    said = json.loads(
        crossplay.matrix_json(crossplay.PayoffMatrix(["a", "b"], [[None, met]] * 2, [0, 0]))
    )
    assert said["meetings"][0] == {
        "row": "a", "column": "b", "games": 1, "missing": 3, "mean": 1.0, "error": None,
        "score": 1.0,
    }  # fmt: skip


def test_games_of_which_nothing_is_known_are_refused() -> None:
    lineups = crossplay.schedule("ab", ROLES)
    played = {name: [game(outcome=1.0)] for name in lineups}
    with pytest.raises(AgentRLError, match="no game gave a return to every seat"):
        crossplay.matrix(list(PLAYERS), ROLES, played)


def test_what_cannot_meet_is_refused(tmp_path: Path) -> None:
    config = run_of(tmp_path)
    with pytest.raises(ConfigError, match=r"selfplay\.seats is empty"):
        crossplay.crossplay(config, [])
    one = checkpoint(tmp_path, "000010")
    with pytest.raises(ConfigError, match=r"there is 1; the run keeps keep_checkpoints"):
        crossplay.chosen_players(config, [])
    with pytest.raises(ConfigError, match=r"there is 1$"):
        crossplay.chosen_players(config, [one])
    with pytest.raises(ConfigError, match="no such checkpoint"):
        crossplay.chosen_players(config, [one, tmp_path / "000020"])
    with pytest.raises(ConfigError, match="is not a checkpoint of a run"):
        crossplay.chosen_players(config, [one, tmp_path / "run"])
    with pytest.raises(ConfigError, match="is not a checkpoint of a run"):
        crossplay.chosen_players(config, [one, checkpoint(tmp_path, "best")])
    playing = run_of(tmp_path, selfplay={"seats": ROLES})
    with pytest.raises(ConfigError, match="two checkpoints have the same name"):
        crossplay.crossplay(playing, [one, one])


def test_each_pair_plays_at_least_so_many_games(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tasks = [{"input": number} for number in range(3)]
    (tmp_path / "tasks.jsonl").write_text("\n".join(map(json.dumps, tasks)))
    config = run_of(
        tmp_path,
        selfplay={"seats": ROLES},
        tasks={"heldout": str(tmp_path / "tasks.jsonl")},
        sampling={"temperature": 0.5},
    )
    named = [checkpoint(tmp_path, name) for name in ("000001", "000002", "000003")][:2]
    asked = []

    def run_plan(
        config: RunConfig,
        last: evaluation.SavedCheckpoint,
        plan: EvaluationPlan,
        kind: str,
        *,
        fresh: bool,
        level: int,
    ) -> dict[str, list[Rollout]]:
        asked.append((plan, last.steps))
        return {name: [game(1.0, -1.0)] * len(plan.tasks) for name in plan.lineups}

    monkeypatch.setattr(crossplay, "run_plan", run_plan)
    found = crossplay.crossplay(config, named, games=9)
    ((plan, last),) = asked
    assert plan.tasks == [*tasks, *tasks[:2]]  # in each of two seats, over again when they are out
    assert (plan.temperature, plan.steps, last) == (0.5, 3, 3)  # the rest plays as it is now
    assert [cell.games for row in found.meetings for cell in row if cell] == [10, 10]


def test_checkpoints_take_the_seats_of_scripted_players() -> None:
    game = {"game": "kuhn_poker", "players": {"first": "random", "third": "mcts:9"}}
    task = {"input": game, "learner": "second"}
    played = crossplay.without_scripts(task, ROLES)
    assert played == {"input": {**game, "players": {"third": "mcts:9"}}, "learner": "second"}
    assert task["input"] is game
    for own in ("text", {"players": {"first": "a"}}, {"game": "x", "players": ["first"]}):
        assert crossplay.without_scripts({"input": own}, ROLES) == {"input": own}


def test_checkpoints_by_their_steps(tmp_path: Path) -> None:
    for name in ("000020", "000005", "000015", "000010.2"):
        checkpoint(tmp_path, name)
    (tmp_path / "run" / "checkpoints" / "000030.tmp-1").mkdir()
    config = run_of(tmp_path)
    assert [made.steps for made in crossplay.chosen_players(config, []).values()] == [5, 10, 15, 20]
    every = crossplay.chosen_players(config, [], every=10)
    assert [*every] == ["policy@000010-2", "policy@000020"]


def test_snapshots_of_the_pool_play_too(tmp_path: Path) -> None:
    """A run keeps two checkpoints, of which one is hardly older than the other."""
    for name in ("000013", "000014"):
        checkpoint(tmp_path, name)
    for name in ("policy@000000", "policy@000013", "other@000001", "policy@000007.tmp-1"):
        (tmp_path / "run" / "pool" / name).mkdir(parents=True)
    found = crossplay.chosen_players(run_of(tmp_path), [])
    assert [*found] == ["policy@000000", "policy@000013", "policy@000014"]
    assert found["policy@000000"].directory == str(tmp_path / "run" / "pool" / "policy@000000")
    assert Path(found["policy@000013"].directory).parent.name == "checkpoints"


# -- plans of evaluations: their runs, their players, and when they have been played ---------------


def test_players_of_other_runs_and_of_several_policies(tmp_path: Path) -> None:
    other = evaluation.checkpoint_at(checkpoint(tmp_path, "000003", run="rival"))
    config = run_of(tmp_path)
    name, player = crossplay.frozen_policy(config, other, "policy")
    assert (name, player.steps, player.directory) == ("rival-policy@000003", 3, str(other.path))
    team = {"solver": {"roles": ["solver"], "lora": {"rank": 2}}}
    team["planner"] = {"roles": ["planner"], "lora": {"rank": 2}}
    several = run_of(tmp_path, policies=team)
    made = evaluation.checkpoint_at(checkpoint(tmp_path, "000004", policy="solver"))
    name, player = crossplay.frozen_policy(several, made, "solver")
    assert (name, player.directory) == ("solver@000004", str(made.path / "solver"))
    with pytest.raises(ConfigError, match="'planner' is not in it"):
        crossplay.frozen_policy(several, made, "planner")


def test_what_decides_a_game_names_the_evaluation(tmp_path: Path) -> None:
    first, last = (checkpoint(tmp_path, name) for name in ("000001", "000002"))
    player = FrozenPolicy(policy="policy", directory=str(first), steps=1)
    plan = EvaluationPlan(players={"a": player}, lineups={}, tasks=[], temperature=1.0, steps=2)
    of = evaluation.checkpoint_at(last)

    def name(plan: EvaluationPlan = plan, **settings: Any) -> str:
        return crossplay.plan_run(run_of(tmp_path, **settings), of, plan, "crossplay").name

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
    async def played(
        config: RunConfig, plan: EvaluationPlan, level: int
    ) -> dict[str, list[Rollout]]:
        return {}

    monkeypatch.setattr(crossplay, "played", played)
    (tmp_path / "tasks.jsonl").write_text('{"input": "x"}\n')
    config = run_of(tmp_path, tasks={"heldout": str(tmp_path / "tasks.jsonl")})
    last = evaluation.checkpoint_at(checkpoint(tmp_path, "000002"))
    plan = EvaluationPlan(players={}, lineups={}, tasks=[], temperature=1.0, steps=2)
    store = Path(crossplay.plan_run(config, last, plan, "ablation").output, "store.db")
    store.parent.mkdir()
    store.touch()
    crossplay.run_plan(config, last, plan, "ablation")
    assert store.exists()
    crossplay.run_plan(config, last, plan, "ablation", fresh=True)
    assert not store.exists()
    assert last.path.is_dir()


async def test_a_plan_has_been_played_when_every_game_has_ended(tmp_path: Path) -> None:
    config = run_of(tmp_path)
    tasks: list[dict[str, Any]] = [{"input": "x"}, {"input": "y"}]
    lineups = {"team": {}, "other": {"left": "a"}}
    plan = EvaluationPlan(players=PLAYERS, lineups=lineups, tasks=tasks, temperature=1.0, steps=2)
    async with open_store(f"sqlite:///{tmp_path / 'store.db'}") as store:
        assert await crossplay.ended(store, config, plan) is None
        await store.open_run(config.name, {})
        for name, seats in lineups.items():
            await store.enqueue(evaluation_rollouts(config, 0, name, tasks, Sampling(), seats))
        attempts = await store.claim(4, runner="test", lease=60.0)
        assert len(attempts) == 4
        for attempt in attempts:
            assert await crossplay.ended(store, config, plan) is None
            await store.finish([Outcome(attempt=attempt.id, fence=attempt.fence)])
        found = await crossplay.ended(store, config, plan)
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
            await crossplay.check_heard(store, "team", rows[:1], {"left": "a"})
        call = factories.call("call", attempt=second.id, role="left")
        await store.add_transitions([call])
        await store.finish([Outcome(attempt=second.id, fence=second.fence)])
        rows = await store.rollouts(config.name)
        await crossplay.check_heard(store, "team", rows, {"left": "a"})
        with pytest.raises(ConfigError, match="no model plays the role 'right' in team"):
            await crossplay.check_heard(store, "team", rows, {"left": "a", "right": "b"})


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
        return [task["input"] for task in crossplay.tasks_of(config, limit)]

    assert inputs(both) == ["heldout 0", "heldout 1", "heldout 2"]
    assert inputs({"train": both["train"]}, 2) == ["train 0", "train 1"]
    with pytest.raises(ConfigError, match="there is nothing to play"):
        inputs({})


# -- what the training of a role is worth: from rollouts to numbers --------------------------------


def test_a_loss_is_paired_by_task() -> None:
    whole = [game(outcome=1.0), game(outcome=0.5), game(outcome=1.0), game()]
    without = [game(outcome=0.0), game(outcome=0.5), game(), game(outcome=1.0)]
    found = crossplay.ablation_row("solver", "solver@000000", whole, without)
    assert (found.pairs, found.loss, found.error) == (2, 0.5, 0.5)
    assert found.team == pytest.approx(2.5 / 3)
    assert found.without == 0.5


@pytest.mark.parametrize(("lost", "said"), [(0.0, "75.0%"), (-1.0, "0.500")])
def test_means_of_wins_and_losses_are_no_percentages(lost: float, said: str) -> None:
    whole = [game(outcome=x) for x in (1.0, lost, 1.0, 1.0)]
    row = crossplay.ablation_row("solver", "solver@000000", whole, whole)
    shown = Console(width=100, record=True, file=io.StringIO())
    shown.print(crossplay.ablation_table([row]))
    assert said in shown.export_text()


def test_roles_that_cannot_be_replaced_are_refused(tmp_path: Path) -> None:
    members = {name: {"roles": [name], "lora": {"rank": 2}} for name in ("solver", "planner")}
    members["judge"] = {"roles": ["judge"], "frozen": True, "model": "m"}
    config = run_of(tmp_path, policies=members)
    assert crossplay.trained_roles(config) == {"solver": "solver", "planner": "planner"}
    with pytest.raises(ConfigError, match="--ablate judge: no trained policy plays it"):
        crossplay.ablate(config, ["judge"], None)
    with pytest.raises(ConfigError, match="name one, such as --ablate"):
        crossplay.ablate(run_of(tmp_path), [], None)


# -- players that do not learn play real games, through gateway, runner and store ------------------


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
