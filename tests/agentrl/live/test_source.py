"""Which sessions a step trains, and when it waits."""

from __future__ import annotations

import resource
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from agentrl.core.config import resolve
from agentrl.core.types import Reward, StepReward
from agentrl.live import source as module
from agentrl.live.bisection import Attempted
from agentrl.live.records import MARK, OUTCOME, SOURCE, Mark
from agentrl.live.source import ROOM, SessionSource, no_room
from agentrl.live.versions import Lineage
from agentrl.runners.feedback import session_group
from agentrl.store import open_store
from tests.agentrl.live.sessions import RUN, ended


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


def test_why_nothing_is_learned_is_said_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    why = ["it is 4 updates ahead"]
    versions = SimpleNamespace(blocked="", too_far_ahead=lambda step: why[0])
    run = SimpleNamespace(config=SimpleNamespace(output=tmp_path))
    given: Any = {"run": run, "lineage": None, "vocabulary": None, "serves": False}
    source = SessionSource(**given, versions=versions)  # type: ignore[arg-type]
    sessions: list[Any] = [SimpleNamespace(group=f"s{n}") for n in range(4)]
    with caplog.at_level("INFO"):
        assert [source._held(4, sessions) for _ in range(3)] == why * 3
        assert (
            caplog.text.count("learning is paused, serving continues: it is 4 updates ahead") == 1
        )
        versions.blocked = "version 0 cannot be loaded"  # which is said where it is found
        assert source._held(4, sessions) == versions.blocked
        versions.blocked, why[0] = "", ""
        assert source._held(4, sessions) == ""
        tried = Attempted(3, ["s3"], once=[row.group for row in sessions])
        source.bisection.file.write_bytes(msgspec.json.encode(tried))
        assert "fix their cause, and delete" in source._held(4, sessions)
        assert source._held(4, sessions[1:]) == ""  # one was trained by another process
        source.bisection.file.unlink()
        assert source._held(4, sessions) == ""
    assert caplog.text.count("learning is paused") == 2


async def test_a_session_that_nobody_labels_is_discarded_after_a_day(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The clock of its end does not count: the watch may have been off for days."""
    async with open_store(f"sqlite:///{tmp_path}/store.db") as store:
        await store.open_run(RUN, {})
        await ended(store, "old", at=0.0)
        rows = await store.rollouts(RUN)
    config = resolve({"name": RUN, "output": str(tmp_path)}, source="test")
    policies = SimpleNamespace(versions=lambda step: {"policy": step})
    run: Any = SimpleNamespace(config=config, policies=policies)
    source = SessionSource(run=run, lineage=Lineage(), vocabulary={}, serves=False)
    began = time.monotonic()
    found = []
    for later in (0.0, 86_399.0, 86_401.0):
        monkeypatch.setattr(module.time, "monotonic", lambda now=began + later: now)
        found.append(len(source._sorted(rows, 1)[1]))
    assert found == [0, 0, 1]
    assert source._sorted([], 1) == ([], [], [])


async def test_sessions_that_raised_alone_wait_are_tried_again_and_are_discarded(
    tmp_path: Path,
) -> None:
    names = ["good", "once", "twice"]
    async with open_store(f"sqlite:///{tmp_path}/store.db") as store:
        await store.open_run(RUN, {})
        for name in names:
            about = await ended(store, name, at=0.0, version=4)
            note = msgspec.json.encode(Mark(ended=0.0, day="", explicit=True)).decode()
            row = Reward(name=MARK, value=1.0, source=SOURCE, note=note)
            outcome = Reward(name=OUTCOME, value=1.0, source=SOURCE)
            await store.add_rewards([StepReward(about, row), StepReward(about, outcome)])
        rows = await store.rollouts(RUN)
    groups = {name: session_group(RUN, name) for name in names}
    config = resolve({"name": RUN, "output": str(tmp_path)}, source="test")
    policies = SimpleNamespace(versions=lambda step: {"policy": 4})
    run: Any = SimpleNamespace(config=config, policies=policies)
    lineage = Lineage()
    source = SessionSource(run=run, lineage=lineage, vocabulary={}, serves=False)
    tried = Attempted(4, [groups["once"]], once=[groups["once"]], twice=[groups["twice"]])
    source.bisection.file.write_bytes(msgspec.json.encode(tried))

    def found(step: int) -> list[list[str]]:
        return [[row.group for row in some] for some in source._sorted(rows, step)]

    assert found(4) == [[groups["good"]], [groups["twice"]], []]
    assert found(5) == [[groups["good"]], [groups["twice"]], [groups["once"]]]
    lineage.empty.append(4)  # the step between trained nothing
    assert found(5) == [[groups["good"]], [groups["twice"]], []]
    source.bisection.file.unlink()
    assert found(5) == [[row.group for row in rows], [], []]
    assert source.unlabelled == {}
