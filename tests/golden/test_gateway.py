"""The gateway answers, asks and stores what `gateway.jsonl` says."""

from __future__ import annotations

import pytest

from tests.golden import files, gateway

GOLDEN = files.read("gateway")


@pytest.fixture(scope="module")
def found() -> dict[str, files.Case]:
    return dict(gateway.cases())


@pytest.mark.parametrize("name", GOLDEN)
def test_what_was_recorded_stays(name: str, found: dict[str, files.Case]) -> None:
    assert name in found, "this case is not played any more"
    files.check(name, GOLDEN[name], found[name])


def test_every_case_is_recorded(found: dict[str, files.Case]) -> None:
    assert sorted(found.keys() - GOLDEN.keys()) == []
