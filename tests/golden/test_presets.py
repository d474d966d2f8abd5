"""Presets and modifiers come to the numbers of `presets.jsonl`."""

from __future__ import annotations

import copy
from functools import cache
from typing import Any

import pytest

from agentrl.core.errors import TrainingError
from tests.golden import access, batches, files, presets

GOLDEN = files.read("presets")
PRESETS = sorted({name.split(" on ")[0] for name in GOLDEN})


@pytest.mark.parametrize("preset", PRESETS)
def test_numbers_of_a_preset_stay(preset: str) -> None:
    specs = {name: spec for name, spec in presets.specs().items() if spec[1] == preset}
    assert specs
    relative = presets.LOOSE.get(preset, files.RELATIVE)
    for name, spec in specs.items():
        files.check(name, GOLDEN.get(name), presets.numbers(*spec), relative)


@cache
def saying_nothing(kind: str, value: float | None) -> list[Any]:
    """The groups of a batch whose rewards are all equal, or missing."""
    records = copy.deepcopy(batches.stored()[kind])
    for rollout in (rollout for record in records for rollout in record["rollouts"]):
        alike = [[*row[:3], value] for row in rollout["rewards"]]
        rollout["rewards"] = alike if value is not None else []
    return access.groups_of(records)


@pytest.mark.parametrize("name", presets.listed())
def test_rewards_that_say_nothing_give_no_nan(name: str) -> None:
    """All equal, or none at all: there, a preset may also refuse the step."""
    kind = presets.home(name)
    for value in (0.0, 0.7, None):
        groups = saying_nothing(kind, value)
        try:
            _, psi, _ = presets.played(presets.named(name), presets.needed(name, kind), groups)
        except TrainingError:
            assert value is None
        else:
            assert psi.isfinite().all(), value


def test_every_listed_preset_has_golden_numbers() -> None:
    missing = [
        name
        for name in presets.listed()
        if not any(case.startswith(f"{presets.named(name)} on ") for case in GOLDEN)
    ]
    assert missing == []


def test_no_golden_case_of_presets_is_left_over() -> None:
    assert sorted(GOLDEN.keys() - presets.specs().keys()) == []
