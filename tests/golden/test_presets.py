"""Presets and modifiers come to the numbers of `presets.jsonl`."""

from __future__ import annotations

import pytest

from tests.golden import files, presets

GOLDEN = files.read("presets")
PRESETS = sorted({name.split(" on ")[0] for name in GOLDEN})


@pytest.mark.parametrize("preset", PRESETS)
def test_numbers_of_a_preset_stay(preset: str) -> None:
    specs = {name: spec for name, spec in presets.specs().items() if spec[1] == preset}
    assert specs
    relative = presets.LOOSE.get(preset, files.RELATIVE)
    for name, spec in specs.items():
        files.check(name, GOLDEN.get(name), presets.numbers(*spec), relative)


def test_every_listed_preset_has_golden_numbers() -> None:
    missing = [
        name
        for name in presets.listed()
        if not any(case.startswith(f"{presets.named(name)} on ") for case in GOLDEN)
    ]
    assert missing == []


def test_no_golden_case_of_presets_is_left_over() -> None:
    assert sorted(GOLDEN.keys() - presets.specs().keys()) == []
