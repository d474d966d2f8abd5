"""How often large checkpoints are written, and what that may cost."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from agentrl.algorithms.train import saving
from agentrl.algorithms.train.saving import Checkpoints
from tests.algorithms.train.test_loop import StandIn

STEP, WRITING = 100.0, 2.0  # seconds


async def test_a_step_that_saves_a_checkpoint_does_not_count(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """After two seconds of writing the next one may come 38 seconds later: here, at each step."""
    clock = SimpleNamespace(now=0.0)
    monkeypatch.setattr(saving, "time", SimpleNamespace(monotonic=lambda: clock.now))
    monkeypatch.setattr(saving, "LARGE", 0)

    def write(path: Path, *_: object) -> None:
        path.mkdir(parents=True)
        (path / "weights").write_text("w")
        clock.now += WRITING

    monkeypatch.setattr(saving, "save_checkpoint", write)
    monkeypatch.setattr(saving, "begin_checkpoint", lambda path, *_: lambda: write(path))
    parts: Any = StandIn()
    checkpoints = Checkpoints(parts.served_run(tmp_path, steps=100))
    names = []
    for steps in range(1, 7):
        clock.now += STEP
        name, _ = await checkpoints.before_commit(steps)
        names.append(name)
        await checkpoints.after_commit(steps)
        if checkpoints.writing is not None:
            await checkpoints.writing[1]
    assert [name and name[-1] for name in names] == ["1", None, "2", "3", "4", "5"]
