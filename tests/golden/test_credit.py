"""psi of presets for agents comes to the numbers of `credit.jsonl`."""

from __future__ import annotations

from tests.golden import credit, files


def test_psi_of_presets_stays() -> None:
    golden, computed = files.read("credit"), dict(credit.cases())
    assert golden.keys() == computed.keys()
    files.check_all(golden, computed)
