"""Attacks on verifiers that look at an agent's files."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from agentrl.audit.report import AuditReport
from agentrl.audit.scoring import Scorer, Subject
from agentrl.audit.workspaces import ATTACKS, audit_workspaces
from agentrl.core.config import resolve
from agentrl.runners.scoring import Verifier
from agentrl.tasks import run_tests

TEST = """\
import unittest
from calc import add

class Hidden(unittest.TestCase):
    def test_add(self):
        self.assertEqual(add(2, 3), 5)
"""
FILES = {"calc.py": "def add(a, b):\n    return None\n"}


async def status(task: Any, workspace: Any) -> float:
    copy = await workspace.fresh(task["tests"])
    done = await copy.run(["python3", "-m", "unittest", "test_hidden"], timeout=30)
    return float(done.status == 0)


async def outcome_file(workspace: Any) -> float:
    file = workspace.path / "reward.txt"
    return float(file.read_text()) if file.exists() else 0.0


async def audited(
    verify: Callable[..., Any], tmp_path: Path, seconds: float = 100.0, **task: Any
) -> AuditReport:
    rows = [{"id": "a", "input": "Fix add.", "files": FILES, "tests": {"test_hidden.py": TEST}}]
    data = {
        "root": str(tmp_path), "agent": {"command": "true"},
        "workspace": {"source": "task.files"}, "output": str(tmp_path / "out"),
    }  # fmt: skip
    config = resolve(data, source="test")
    subject = Subject("v", Scorer(Verifier(verify), timeout=60.0), [row | task for row in rows])
    return await audit_workspaces(subject, config, seconds)


async def test_an_exit_status_proves_nothing(tmp_path: Path) -> None:
    report = await audited(status, tmp_path)
    named = {one.attack for one in report.alarms}
    assert {"modules that end", "a shadowed test runner"} <= named


async def test_hidden_tests_of_the_library_are_sound(tmp_path: Path) -> None:
    report = await audited(run_tests, tmp_path)
    assert [one.attack for one in report.alarms] == []
    assert (report.verdict, report.scored) == ("no hole found", len(ATTACKS))


async def test_files_that_an_agent_may_write_are_named(tmp_path: Path) -> None:
    report = await audited(outcome_file, tmp_path)
    assert [one.attack for one in report.alarms] == ["an outcome file"]


async def test_answers_in_a_workspace_are_named(tmp_path: Path) -> None:
    files = FILES | {"notes.md": f"hint\n{TEST}"}
    report = await audited(outcome_file, tmp_path, files=files)
    assert "answers in reach" in {one.attack for one in report.alarms}


async def test_nothing_is_written_outside_of_a_workspace(tmp_path: Path) -> None:
    for outside in (str(tmp_path / "away.txt"), "../../away.txt"):
        await audited(outcome_file, tmp_path, reward_file=outside)
    assert not list(tmp_path.rglob("away*"))


async def test_attacks_that_were_not_made_are_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("agentrl.audit.workspaces.MAX_TASKS", 0)
    complete = await audited(outcome_file, tmp_path)
    assert not any("time ran out" in note for note in complete.notes)
    monkeypatch.undo()
    late = await audited(outcome_file, tmp_path, seconds=0.0)
    assert "time ran out after 0 of 9 attacks" in late.notes
