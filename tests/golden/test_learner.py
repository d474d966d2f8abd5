"""Training steps of the embedded learner come to the figures of `learner.jsonl`."""

from __future__ import annotations

import pytest

from tests.golden import files, learner

GOLDEN = files.read("learner")


@pytest.mark.parametrize("name", learner.STEPS)
def test_a_training_step_stays(name: str) -> None:
    found = learner.step(name, *learner.STEPS[name])
    files.check(name, GOLDEN.get(name), found, learner.RELATIVE)


def test_no_golden_step_is_left_over() -> None:
    assert sorted(GOLDEN.keys() - learner.STEPS.keys()) == []
