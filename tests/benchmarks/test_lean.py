"""The paired benchmark reads the figures of both builds."""

from __future__ import annotations

import argparse
import sqlite3
from contextlib import closing
from pathlib import Path

from tests.benchmarks import lean


def test_both_builds_take_turns_and_are_compared(tmp_path: Path) -> None:
    options = argparse.Namespace(baseline=lean.ROOT, only=["import"], seeds=[0])
    found = lean.paired(options, tmp_path)
    ((here, there),) = found["import_cpu"]
    assert 0.0 < here < 1.0
    assert found["import_cpu_ratio"] == here / there


def test_a_rollout_has_begun_once_it_is_claimed(tmp_path: Path) -> None:
    store = tmp_path / "store.db"
    assert not lean.has_begun(store)
    with closing(sqlite3.connect(store)) as db:
        db.execute("create table attempts (id text)")
        assert not lean.has_begun(store)
        db.execute("insert into attempts values ('a')")
        db.commit()
    assert lean.has_begun(store)


def test_peak_and_scores_are_those_of_all_rows() -> None:
    rows = [
        {"metrics": {"eval/score": 0.1, "memory/process_peak_mb": 900.0}},
        {"metrics": {"memory/process_peak_mb": 1200.0}},
        {"metrics": {"eval/score": 0.8, "eval/sampled": 0.7}},
    ]
    found = lean.summary(rows)
    assert found == {"peak_mb": 1200.0, "greedy_after": 0.8, "sampled_after": 0.7}
    assert lean.ratios({"a_mb": [[1.0, 2.0]], "greedy_after": [[1.0, 1.0]]}) == {"a_mb_ratio": 0.5}
