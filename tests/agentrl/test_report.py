"""What a report draws."""

from __future__ import annotations

from agentrl.report import roles
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
