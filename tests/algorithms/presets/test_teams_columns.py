"""Chosen roles by hand."""

from __future__ import annotations

import pytest

from agentrl.algorithms.presets.teams import RoleFilter
from agentrl.errors import TrainingError
from tests.algorithms.credit.test_calls import steps
from tests.algorithms.worlds import Call, Play, world


def test_only_chosen_roles_are_trained() -> None:
    batch = world(Play([Call(role="a", tokens=2), Call(role="b")]))
    assert RoleFilter(("b",))(batch).tolist() == [False, False, True]


def test_a_role_that_made_no_call_is_refused() -> None:
    batch = world(Play(steps(0, 1)))
    with pytest.raises(TrainingError, match=r"none of the 2 calls .* role 'agnt'; did you mean"):
        RoleFilter(("agnt",))(batch)
