"""Credit of teams by hand, on two rollouts in which `a` and `b` make a call each."""

from __future__ import annotations

from typing import Any

import pytest

from agentrl.algorithms.objective.core import compute_advantages
from agentrl.algorithms.presets.registry import make
from agentrl.algorithms.presets.teams import RoleFilter
from agentrl.core.errors import TrainingError
from tests.algorithms.credit.test_calls import steps
from tests.algorithms.worlds import EVERY_OUTPUT, NAN, Call, Play, world

UP = 0.5**0.5  # of two numbers, the higher one less the mean, in standard deviations
P, TACT = {"reward": "transition:p"}, {"reward": "role:tact"}
WON = Play(
    [Call(role="a", rewards={"p": 1.0, "v": 0.5}), Call(role="b", rewards={"p": 0.0, "v": 0.5})],
    outcome=1.0,
    tact={"a": 1.0, "b": 0.0},
)
LOST = Play(
    [Call(role="a", rewards={"p": 0.0, "v": 0.25}), Call(role="b", rewards={"p": 1.0, "v": 0.0})],
    outcome=0.0,
    tact={"a": 0.0, "b": 0.5},
)


@pytest.mark.parametrize(
    ("name", "options", "expected"),
    [
        ("magrpo", {}, [0.5, 0.5, -0.5, -0.5]),
        ("magrpo", {"baseline": "max"}, [0.0, 0.0, -1.0, -1.0]),
        ("magrpo", {"baseline": "loo"}, [1.0, 1.0, -1.0, -1.0]),
        ("magrpo", {"baseline": "none"}, [1.0, 1.0, 0.0, 0.0]),
        ("magrpo", P | {"mode": "cross"}, [0.5, -0.5, -0.5, 0.5]),
        ("magrpo", P | {"mode": "cross", "baseline": "max"}, [0.0, -1.0, -1.0, 0.0]),
        ("at-grpo", {}, [UP, UP, -UP, -UP]),
        ("marti", P, [UP, -UP, -UP, UP]),
        ("maporl", P | {"value": "transition:v"}, [UP, -UP, -UP, UP]),
        ("sage", TACT, [UP, -UP, -UP, UP]),
        ("shapley", TACT, [0.5, -0.25, -0.5, 0.25]),
        ("difference", TACT, [0.5, -0.25, -0.5, 0.25]),
        ("difference", TACT | {"baseline": "none"}, [1.0, 0.0, 0.0, 0.5]),
        ("dr-mas", {}, [UP, UP, -UP, -UP]),
        ("m-grpo", {"main": "a", "sub_reward": "transition:p"}, [UP, -1.0, -UP, 1.0]),
        ("grpo+per-role", {}, [UP, UP, -UP, -UP]),
        ("dr-grpo+only", {"only_roles": ["b"]}, [NAN, 0.5, NAN, -0.5]),
        ("dr-grpo+call-discount", {"call_discount_gamma": 0.5}, [0.25, 0.5, -0.25, -0.5]),
        ("archer", {"advantage": "transition:p"}, [1.0, 0.0, 0.0, 1.0]),
    ],
)
def test_credit_of_a_team(name: str, options: dict[str, Any], expected: list[float]) -> None:
    algo = make(name, options, supplies=EVERY_OUTPUT)
    found = compute_advantages(algo, world(WON, LOST, values=[0.0] * 4)).tolist()
    assert found == pytest.approx(expected, abs=1e-5, nan_ok=True)


def test_an_episode_of_one_answer_may_have_its_rollouts_reward() -> None:
    algo = make("maporl", {"reward": "outcome"}, supplies=("old", "sampler", "values"))
    calls = [Call(role="a"), Call(role="b")]
    batch = world(Play(calls, outcome=1.0), Play(calls, outcome=0.0), values=[0.0] * 4)
    up = 0.5**0.5
    assert compute_advantages(algo, batch).tolist() == pytest.approx([up, up, -up, -up], rel=1e-5)


def test_only_chosen_roles_are_trained() -> None:
    batch = world(Play([Call(role="a", tokens=2), Call(role="b")]))
    assert RoleFilter(("b",))(batch).tolist() == [False, False, True]


def test_a_role_that_made_no_call_is_refused() -> None:
    batch = world(Play(steps(0, 1)))
    with pytest.raises(TrainingError, match=r"none of the 2 calls .* role 'agnt'; did you mean"):
        RoleFilter(("agnt",))(batch)
