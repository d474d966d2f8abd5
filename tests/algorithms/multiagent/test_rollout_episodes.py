"""Rollouts of a team as episodes."""

from __future__ import annotations

import pytest
import torch

from agentrl.algorithms.multiagent.rollout_episodes import Stage, hashed, seen
from agentrl.types import Rollout
from tests.algorithms.multiagent.test_critics import rollout

STAGE = Stage(("planner", "solver"), ("Left", "right"), 16)


def test_an_action_is_a_declared_answer_or_one_more() -> None:
    calls = rollout("x", [0, 1, 2], 1.0).transitions
    assert [STAGE.action(call) for call in calls] == [0, 1, 2]
    assert STAGE.choices == 3


def test_a_joint_step_is_a_round() -> None:
    played: Rollout = rollout("x", [0, 1, 1, 2, 0], 0.5)
    assert list(STAGE.moves(played).values()) == [(0, 0), (0, 1), (1, 0), (1, 1), (2, 0)]
    episode = STAGE.episode(played, 0.5)
    assert episode.actions.tolist() == [[0, 1], [1, 2], [0, 0]]
    assert episode.acting is not None
    assert episode.acting.tolist() == [[True, True], [True, True], [True, False]]
    assert episode.rewards.tolist() == [0, 0, 0.5]
    assert torch.equal(episode.states, episode.observations.flatten(1))
    assert (episode.observations[2, 1] == 0).all()


def test_calls_of_other_roles_are_no_moves() -> None:
    alone = Stage(("solver",), ("left",), 4)
    assert list(alone.moves(rollout("x", [0, 1, 0, 1], 1.0)).values()) == [(0, 0), (1, 0)]


def test_an_observation_is_what_was_said_last_of_length_one() -> None:
    call = rollout("x", [0, 1], 1.0).transitions[1]
    assert seen(call) == "see 1 [0]"
    x = hashed("one two two", 32)
    assert x.norm().item() == pytest.approx(1)
    assert torch.equal(x, hashed("TWO one, two!", 32))
    assert not torch.equal(x, hashed("one two", 32))
    assert (hashed("", 4) == 0).all()
