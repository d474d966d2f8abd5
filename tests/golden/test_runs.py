"""Commands print of stored runs what `runs.jsonl` says."""

from __future__ import annotations

import pytest

from tests.golden import files, runs

GOLDEN = files.read("runs")


@pytest.fixture(scope="module")
def found() -> dict[str, files.Case]:
    return dict(runs.cases())


@pytest.mark.parametrize("name", GOLDEN)
def test_what_was_recorded_stays(name: str, found: dict[str, files.Case]) -> None:
    assert name in found, "this case is not played any more"
    files.check(name, GOLDEN[name], found[name])


def test_every_case_is_recorded(found: dict[str, files.Case]) -> None:
    assert sorted(found.keys() - GOLDEN.keys()) == []
