"""What a report draws."""

from __future__ import annotations

from agentrl.config import resolve
from agentrl.report import roles, unheard
from agentrl.types import StepRow


def row(step: int, **metrics: float) -> StepRow:
    return StepRow(run="run", step=step, metrics=metrics, committed=True, at=0.0)


def test_each_role_has_a_curve_of_its_own() -> None:
    steps = [
        row(0, **{"reward/mean": 0.5, "role/planner/reward": 0.25, "role/a/b/reward": 1.0}),
        row(1, **{"reward/mean": 0.5, "role/a/b/reward": 0.0, "role/planner/tokens": 9.0}),
    ]
    assert roles(steps) == {"planner": [(0, 0.25)], "a/b": [(0, 1.0), (1, 0.0)]}
    assert roles([row(0, **{"reward/mean": 0.5})]) == {}


def test_a_policy_whose_roles_never_speak_is_named() -> None:
    members = {
        name: {"roles": [name], "lora": {"rank": 2}} for name in ("solver", "planer", "late")
    }
    members["judge"] = {"roles": ["judge"], "frozen": True, "model": "m"}
    config = resolve({"policy": {"model": "m"}, "policies": members}, source="test")
    spoken = {"role/solver/reward": 1.0, "role/planner/reward": 1.0}
    steps = [
        row(0, **spoken, **{"solver/calls": 0.0, "planer/calls": 0.0}),
        row(1, **spoken, **{"solver/calls": 3.0, "planer/calls": 0.0}),
    ]
    assert unheard(config, steps) == {
        "planer": "the policy 'planer' has learned nothing: no call was made in its roles "
        "('planer'); the roles that spoke are 'planner', 'solver'"
    }
    assert unheard(resolve({}, source="test"), [row(0, calls=0.0)]) == {}
