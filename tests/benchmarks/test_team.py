"""What the team benchmark makes of the steps of its runs."""

from __future__ import annotations

import pytest

from agentrl.core.types import StepRow
from tests.benchmarks.team import compare, curve, reached, smoothed


def row(step: int, **metrics: float) -> StepRow:
    named = {name.replace("_", "/"): value for name, value in metrics.items()}
    return StepRow(run="r", step=step, metrics=named, committed=True, at=0.0)


def test_an_evaluation_comes_before_the_rollouts_of_its_step() -> None:
    rows = [row(0, eval_score=0.1, rollouts=64), row(1, rollouts=72), row(2, eval_score=0.4)]
    assert curve(rows) == [(0.0, 0.1), (136.0, 0.4)]


def test_success_is_the_mean_of_three_evaluations() -> None:
    points = [(0.0, 0.0), (1.0, 0.6), (2.0, 0.3), (3.0, 0.6)]
    assert [score for _, score in smoothed(points)] == pytest.approx([0.0, 0.3, 0.3, 0.5])


def test_an_arm_is_measured_by_its_rollouts_to_a_level() -> None:
    flat = [(0.0, 0.1), (64.0, 0.1), (128.0, 0.1)]
    slow = [(float(at), 0.1 + at / 1000) for at in range(0, 640, 64)]
    fast = [(spent, min(0.9, 0.1 + spent / 500)) for spent, _ in slow]
    found = compare({"shared": slow, "fast": fast, "flat": flat})
    assert found["shared"]["ratio"] == 1.0
    assert found["shared"]["rollouts"] == 576.0
    assert found["fast"]["ratio"] == pytest.approx(320 / 576)
    assert found["flat"]["ratio"] is None
    assert reached(slow, 0.1) == 0.0
