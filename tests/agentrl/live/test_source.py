"""Which sessions a step trains, and when it waits."""

from __future__ import annotations

import resource
from pathlib import Path

from agentrl.live.source import ROOM, no_room


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
