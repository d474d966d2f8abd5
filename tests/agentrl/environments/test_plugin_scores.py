"""What plug-ins make of what their packages say of an episode that was not judged."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from agentrl.environments.plugins import games, reasoning_gym, verdicts


def trace(**fields: Any) -> Any:
    row = SimpleNamespace(value=1.0)
    known = {"errors": [], "is_timeout": False, "stop_condition": "agent_completed"}
    return SimpleNamespace(**known | {"rewards": {"right": row}, "reward": 1.0} | fields)


def episode(*traces: Any, **fields: Any) -> Any:
    known = {"errors": [], "is_timeout": False, "ok": True, "traces": [*traces]}
    return SimpleNamespace(**known | fields)


def test_verifiers_v1_scores_an_episode_that_was_judged() -> None:
    assert verdicts.scores_of_episode(episode(trace())) == {"right": 1.0, "outcome": 1.0}


@pytest.mark.parametrize(
    ("found", "message"),
    [
        (episode(trace(), errors=[SimpleNamespace(message="finalize broke")]), "finalize broke"),
        (episode(trace(errors=[SimpleNamespace(message="no box")]), ok=False), "no box"),
        (episode(trace(is_timeout=True, stop_condition="scoring_timeout")), "scoring_timeout"),
        (episode(trace(is_timeout=True, stop_condition="setup_timeout", rewards={})), "setup"),
        (episode(trace(), ok=False), "gave no reason"),
        (episode(), "0 agents played"),
        (episode(trace(), trace()), "2 agents played"),
        (episode(trace(rewards={"right": None}, reward=0)), "no reward 'right'"),
        (episode(trace(rewards={}, reward=0)), "gave no reward: the taskset"),
    ],
)
def test_verifiers_v1_gives_no_number_for_one_that_was_not(found: Any, message: str) -> None:
    with pytest.raises(RuntimeError, match=message):
        verdicts.scores_of_episode(found)


def score(value: Any) -> Any:
    return SimpleNamespace(value=value)


@pytest.mark.parametrize(
    ("given", "chosen", "outcome"),
    [
        ({"match": score("C")}, "", 1.0),
        ({"match": score("True")}, "", 1.0),
        ({"match": score("NO")}, "", 0.0),
        ({"match": score(False)}, "", 0.0),
        ({"match": score("0.25")}, "", 0.25),
        ({"match": score({"format": 1, "correct": 0})}, "match/correct", 0.0),
        ({"match": score({"correct": 0})}, "match", 0.0),
        ({"match": score("C"), "match1": score("I")}, "match1", 0.0),
    ],
)
def test_inspect_scores(given: Any, chosen: str, outcome: float) -> None:
    assert verdicts.scores(given, chosen)["outcome"] == outcome


@pytest.mark.parametrize(
    ("given", "chosen", "message"),
    [
        ({"m": score({"format": 1, "correct": 0})}, "", r"one of its scores: \['m/format', 'm/c"),
        ({"m": score({"format": 1, "correct": 0})}, "m", r"one of its scores: \['m/format', 'm/c"),
        ({"m": score("C"), "m1": score("I")}, "", r"one of its scores: \['m', 'm1'\]"),
        ({}, "", "no scorer gave a score"),
        ({"m": score(None)}, "", "the score m is None, which is not a number"),
        ({"m": score("maybe")}, "", "the score m is 'maybe', which is not a number"),
        ({"m": score([1, 0])}, "", r"the score m is \[1, 0\], which is not a number"),
    ],
)
def test_inspect_gives_no_number_where_none_is_meant(given: Any, chosen: str, message: str) -> None:
    with pytest.raises(RuntimeError, match=message):
        verdicts.scores(given, chosen)


def test_two_scorers_of_one_name_are_two() -> None:
    assert verdicts.numbered(["match", "f1", "match", "match"]) == [
        "match",
        "f1",
        "match1",
        "match2",
    ]


class Made:
    """A game that has ended so."""

    def __init__(self, rewards: Any, info: Any) -> None:
        self.ended = rewards, info

    def step(self, action: str) -> tuple[bool, dict[str, Any]]:
        return True, {}

    def close(self) -> Any:
        return self.ended


def played(rewards: Any, info: Any = None, names: tuple[str, ...] = ("agent",)) -> Any:
    game = games.TextArenaGame.__new__(games.TextArenaGame)
    game.plugin = SimpleNamespace(names=names, limit=9, illegal=-1.0)
    game.env, game.role, game.turns, game.moved = Made(rewards, info), names[0], 0, set()
    return game.step({"content": "[up]"})


def test_an_illegal_move_has_the_reward_that_the_page_says() -> None:
    for given in (0.25, 0.0, "Edge outside board."):  # RushHour, FrozenLake, Slitherlink
        assert played({0: given}, {0: {"invalid_move": True}}) == ("", -1.0, True)
    assert played({0: 0.25}, {0: {"invalid_move": False}}) == ("", 0.25, True)


@pytest.mark.parametrize(
    ("rewards", "names", "message"),
    [
        ({0: "solved"}, ("agent",), "the reward 'solved' is not a number"),
        ({0: "1.0"}, ("agent",), "the reward '1.0' is not a number"),
        (None, ("agent",), "ended without a reward for agent"),
        ({0: 1}, ("player_0", "player_1"), "ended without a reward for player_1"),
    ],
)
def test_a_game_that_gives_no_number(rewards: Any, names: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        played(rewards, names=names)


def test_a_question_with_an_apostrophe_is_found_behind_a_system_prompt() -> None:
    question = 'Zoe said, "I don\'t know".\nWho lies?'
    plugin = reasoning_gym.ReasoningGym.__new__(reasoning_gym.ReasoningGym)
    entry = {"question": question, "answer": "Zoe", "metadata": {}}
    plugin.data = {"train": [entry]}
    told = [{"role": "system", "content": "Think."}, {"role": "user", "content": question}]
    task = {"input": told, "entry": "<not a literal>", "split": "train", "index": 0}
    plugin._entry(task | {"entry": "Counter()"})
    with pytest.raises(RuntimeError, match="PYTHONHASHSEED"):
        plugin._entry(task | {"entry": "Counter()", "input": "another"})
