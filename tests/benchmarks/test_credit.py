"""Figures of CREDIT.md that the benchmark of credit measures, on fewer groups."""

from __future__ import annotations

import pytest

from tests.benchmarks import credit


def test_batch_td_has_a_quarter_of_the_variance_of_broadcast(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(credit, "GROUPS", 800)
    found = credit.variance()
    assert found["variance reduction batch-td"] > 4.5
    assert found["variance reduction batch-td"] > 1.5 * found["variance reduction peers"]
    assert found["bias batch-td"] < 4
