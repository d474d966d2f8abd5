"""Run files come to the settings of `dryrun.jsonl`."""

from __future__ import annotations

import pytest

from tests.golden import dryrun, files

GOLDEN = files.read("dryrun")


@pytest.fixture(scope="module")
def found() -> dict[str, files.Case]:
    return dict(dryrun.cases())


@pytest.mark.parametrize("name", GOLDEN)
def test_what_was_recorded_stays(name: str, found: dict[str, files.Case]) -> None:
    assert name in found, "this case is not played any more"
    files.check(name, GOLDEN[name], found[name])


def test_every_case_is_recorded(found: dict[str, files.Case]) -> None:
    assert sorted(found.keys() - GOLDEN.keys()) == []
