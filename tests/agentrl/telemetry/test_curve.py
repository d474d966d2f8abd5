"""What the picture of a learning curve shows."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from agentrl.config import resolve
from agentrl.telemetry.curve import save_curve
from agentrl.types import StepRow


def row(step: int, **metrics: float) -> StepRow:
    return StepRow(run="run", step=step, metrics=metrics, committed=True, at=0.0)


@pytest.mark.parametrize(
    ("temperature", "tasks", "label"),
    [(0.0, 200.0, "held-out, greedy, 200 tasks"),
     (0.7, None, "held-out, at temperature 0.7")],
)  # fmt: skip
def test_the_curve_says_how_it_was_measured_and_begins_at_the_first_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, temperature: float, tasks: float, label: str
) -> None:
    from matplotlib import pyplot as plt

    kept: list[Any] = []
    monkeypatch.setattr(plt, "close", kept.append)
    how = {"eval": {"temperature": temperature}}
    config = resolve({"name": "run", "output": str(tmp_path)} | how, source="test")
    known = {} if tasks is None else {"eval/tasks": tasks}
    steps = [
        row(0, **{"reward/mean": 0.25, "role/a/reward": 0.2, "eval/score": 0.1} | known),
        row(1, **{"reward/mean": 0.5, "role/a/reward": 0.4}),
        row(2, **{"eval/score": 0.6}),
    ]
    save_curve(config, steps)
    lines = {line.get_label(): list(line.get_xdata()) for line in kept[0].axes[0].lines}
    assert lines[label] == [0, 2]
    assert [xs for name, xs in lines.items() if name != label] == [[1, 2], [1, 2]]
