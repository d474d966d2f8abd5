"""Run files, model calls and commands come to what `dryrun`, `gateway` and `runs.jsonl` say."""

from __future__ import annotations

from functools import cache

import pytest

from tests.golden import dryrun, files, gateway, runs

KINDS = {"dryrun": dryrun, "gateway": gateway, "runs": runs}
GOLDEN = {kind: files.read(kind) for kind in KINDS}


@cache
def played(kind: str) -> dict[str, files.Case]:
    return dict(KINDS[kind].cases())


@pytest.mark.parametrize(("kind", "name"), [(k, name) for k in KINDS for name in GOLDEN[k]])
def test_what_was_recorded_stays(kind: str, name: str) -> None:
    assert name in played(kind), "this case is not played any more"
    files.check(name, GOLDEN[kind][name], played(kind)[name])


@pytest.mark.parametrize("kind", KINDS)
def test_every_case_is_recorded(kind: str) -> None:
    assert sorted(played(kind).keys() - GOLDEN[kind].keys()) == []
