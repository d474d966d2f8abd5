"""Rollouts of a team as episodes."""

from __future__ import annotations

import pytest
import torch

from agentrl.algorithms.presets.multiagent import JointActionSpace, hashed_words, observed_text
from agentrl.core.types import Rollout
from tests.algorithms.presets.test_multiagent_critics import rollout

STAGE = JointActionSpace(("planner", "solver"), ("Left", "right"), 16)


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
    alone = JointActionSpace(("solver",), ("left",), 4)
    assert list(alone.moves(rollout("x", [0, 1, 0, 1], 1.0)).values()) == [(0, 0), (1, 0)]


def test_an_observation_is_what_was_said_last_of_length_one() -> None:
    call = rollout("x", [0, 1], 1.0).transitions[1]
    assert observed_text(call) == "see 1 [0]"
    x = hashed_words("one two two", 32)
    assert x.norm().item() == pytest.approx(1)
    assert torch.equal(x, hashed_words("TWO one, two!", 32))
    assert not torch.equal(x, hashed_words("one two", 32))
    assert (hashed_words("", 4) == 0).all()
