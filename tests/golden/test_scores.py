"""Scores of trainings that are worse than those of `scores.jsonl` are reported."""

from __future__ import annotations

import copy

import pytest

from tests.golden import files, scores

GOLDEN = [case for name, case in files.read("scores").items() if name.startswith("demo")]


def test_the_demo_is_recorded_on_three_seeds() -> None:
    assert len(GOLDEN) == len(scores.SEEDS)
    assert all(case["curves"]["eval/score"][-1] > 0.9 for case in GOLDEN)
    assert scores.compared("demo", GOLDEN, GOLDEN) == []


@pytest.mark.parametrize(
    ("change", "line"),
    [
        (lambda case: case.update(steps=24), "steps"),
        (lambda case: case["sums"].update({"update/bad": 1}), "update/bad: 0 became 3"),
        (lambda case: case["curves"]["eval/score"].__setitem__(-1, 0.9), "eval/score after"),
        (lambda case: case["curves"]["eval/sampled"].clear(), "eval/sampled before"),
    ],
)
def test_what_is_worse_is_a_line(change: object, line: str) -> None:
    assert callable(change)
    worse = copy.deepcopy(GOLDEN)
    for case in worse:
        change(case)
    assert any(found.startswith(line) for found in scores.compared("demo", GOLDEN, worse))
