"""Figures of CREDIT.md that the benchmark of credit measures, on fewer groups."""

from __future__ import annotations

import pytest

from tests.benchmarks import credit


def test_peers_and_batch_td_have_less_variance_than_broadcast(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(credit, "GROUPS", 800)
    found = credit.variance()
    assert found["variance reduction batch-td"] > 4.5
    assert 3.6 > found["variance reduction peers"] > 3.1
    assert max(found["bias peers"], found["bias batch-td"]) < 4
