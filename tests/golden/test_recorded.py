"""Run files, model calls and commands come to what `dryrun`, `gateway` and `runs.jsonl` say."""

from __future__ import annotations

import pytest

from tests.golden import dryrun, files, gateway, runs

KINDS = {"dryrun": dryrun, "gateway": gateway, "runs": runs}


@pytest.mark.parametrize("kind", KINDS)
def test_what_was_recorded_stays(kind: str) -> None:
    golden, played = files.read(kind), dict(KINDS[kind].cases())
    assert sorted(golden) == sorted(played)
    files.check_all(golden, played)
