"""Which sessions a step trains, and when it waits."""

from __future__ import annotations

import resource
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from agentrl.live.source import ROOM, SessionSource, no_room


def test_learning_waits_while_a_step_cannot_be_written(tmp_path: Path) -> None:
    assert no_room(tmp_path, 1000) == ""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (ROOM, hard))
    try:
        assert no_room(tmp_path, 0) == ""
        assert no_room(tmp_path, 1000).startswith(f"{tmp_path} has no room for 16,779,216 bytes")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert list(tmp_path.iterdir()) == []


def test_why_nothing_is_learned_is_said_once(caplog: pytest.LogCaptureFixture) -> None:
    why = ["it is 4 updates ahead"]
    versions = SimpleNamespace(stuck="", too_far_ahead=lambda step: why[0])
    run = SimpleNamespace(config=SimpleNamespace(output="."))
    given: Any = {"run": run, "lineage": None, "vocabulary": None, "serves": False}
    source = SessionSource(**given, versions=versions)  # type: ignore[arg-type]
    with caplog.at_level("INFO"):
        assert [source._held(4) for _ in range(3)] == why * 3
        assert caplog.text.count("learning waits, and serving goes on: it is 4 updates ahead") == 1
        versions.stuck = "version 0 cannot be loaded"  # which is said where it is found
        assert source._held(4) == versions.stuck
        versions.stuck, why[0] = "", ""
        assert source._held(4) == ""
    assert caplog.text.count("learning waits") == 1
