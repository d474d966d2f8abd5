"""psi of presets for agents comes to the numbers of `credit.jsonl`."""

from __future__ import annotations

from functools import cache

import pytest

from tests.golden import credit, files

GOLDEN = files.read("credit")


@cache
def computed() -> dict[str, files.Case]:
    return dict(credit.cases())


@pytest.mark.parametrize("preset", sorted({name.partition(" ")[0] for name in GOLDEN}))
def test_psi_of_a_preset_stays(preset: str) -> None:
    for name, case in GOLDEN.items():
        if name.partition(" ")[0] == preset:
            files.check(name, case, computed()[name])


def test_every_case_of_credit_is_recorded() -> None:
    assert computed().keys() == GOLDEN.keys()
