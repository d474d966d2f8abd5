"""The stored figures of groups that run together."""

from __future__ import annotations

import json
import multiprocessing
from pathlib import Path

from tests.benchmarks.models import store


def test_groups_that_run_together_keep_each_others_figures(tmp_path: Path) -> None:
    path, fork = tmp_path / "models.json", multiprocessing.get_context("fork")
    store(path, {"old": {}}, "1")
    groups = [fork.Process(target=store, args=(path, {f"{k}": {}}, "2")) for k in range(12)]
    for group in groups:
        group.start()
    for group in groups:
        group.join()
    stored = json.loads(path.read_text())
    assert stored == {"transformers": "2", "classes": {f"{k}": {} for k in range(12)}}
