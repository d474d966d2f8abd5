"""Who beats whom: from rollouts to numbers."""

from __future__ import annotations

import json
from math import isnan, nan
from pathlib import Path

import pytest

from agentrl.algorithms.selfplay import crossplay
from agentrl.checkpoints import saved as evaluation
from agentrl.config import RunConfig
from agentrl.errors import AgentRLError, ConfigError
from agentrl.evaluation.plans import play
from agentrl.evaluation.plans.plan import EvaluationPlan
from agentrl.types import (
    Rollout,
    RolloutState,
)
from tests.agentrl.games import PLAYERS, ROLES, checkpoint, game, run_of


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
        crossplay.as_json(crossplay.PayoffMatrix(["a", "b"], [[None, met]] * 2, [0, 0]))
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
    ) -> dict[str, list[Rollout]]:
        asked.append((plan, last.steps))
        return {name: [game(1.0, -1.0)] * len(plan.tasks) for name in plan.lineups}

    monkeypatch.setattr(play, "run_plan", run_plan)
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
