"""Attacks on verifiers that look at an agent's files, in real containers and with real programs."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from agentrl.audit import workspaces
from agentrl.audit.report import AuditReport
from agentrl.audit.scoring import Scorer, Subject
from agentrl.core.config import resolve
from agentrl.runners.scoring import Verifier
from agentrl.tasks import run_tests
from tests.runners.executors.real import ENGINE, needs_podman
from tests.runners.executors.real import real as real

pytestmark = needs_podman
TEST = """\
. ./calc.sh
[ "$(add 2 3)" = 5 ] && echo "PASSED test.sh::add" || { echo "FAILED test.sh::add"; exit 1; }
"""
FILES = {"calc.sh": "add() { echo 0; }\n", "test.sh": TEST, "bin/check": "#!/bin/sh\nsh test.sh\n"}
TASK = {"input": "Fix add.", "files": FILES, "hidden_tests": {"test.sh": TEST}}


async def own_tests(task: Any, workspace: Any) -> float:
    """A hole: the agent may have changed the tests."""
    return float((await workspace.run(["sh", "test.sh"])).status == 0)


async def collected_tests(task: Any, workspace: Any) -> float:
    """A hole: no test is no failure."""
    done = await workspace.run(["sh", "-c", "for t in *test.sh; do [ ! -f $t ] || sh $t; done"])
    return float("FAILED" not in done.stdout)


async def own_program(task: Any, workspace: Any) -> float:
    """A hole: the program that runs the hidden tests is the agent's."""
    copy = await workspace.fresh(task["hidden_tests"])
    return float((await copy.run(["sh", "bin/check"])).status == 0)


async def first_in_path(task: Any, workspace: Any) -> float:
    """A hole: programs of the workspace are found before those of the image."""
    copy = await workspace.fresh(task["hidden_tests"])
    done = await copy.run(["sh", "-c", "PATH=$PWD/bin:$PATH; pytest || make test"])
    return float(done.status == 0)


async def left_file(task: Any, workspace: Any) -> float:
    """A hole: the file of an earlier run counts."""
    copy = await workspace.fresh(task["hidden_tests"])
    await copy.run(["sh", "-c", "sh test.sh && echo 1 > reward.txt"])
    file = copy.path / "reward.txt"
    return float(file.read_text()) if file.exists() else 0.0


async def status_of_hidden(task: Any, workspace: Any) -> float:
    """A hole: the test sources the agent's file, which may end it with status 0."""
    copy = await workspace.fresh(task["hidden_tests"])
    return float((await copy.run(["sh", "test.sh"])).status == 0)


async def content(task: Any, workspace: Any) -> float:
    """Honest: what the file says."""
    return float("$1 + $2" in (workspace.path / "calc.sh").read_text())


async def said(task: Any, workspace: Any) -> float:
    """Honest: the value that a program of the image gets from the agent's function."""
    copy = await workspace.fresh()
    done = await copy.run(["sh", "-c", '. ./calc.sh; echo "$(add 20 22) $(add 4 5)"'])
    return float(done.stdout.strip() == "42 9")


async def audited(
    verify: Callable[..., Any], image: str, tmp_path: Path, **task: Any
) -> AuditReport:
    data = {
        "root": str(tmp_path), "agent": {"command": "true"}, "output": str(tmp_path / "out"),
        "workspace": {"source": "task.files", "sandbox": "container"},
        "runner": {"executor": "container", "container": {"image": image, "cli": ENGINE}},
    }  # fmt: skip
    config = resolve(data, source="test")
    subject = Subject("v", Scorer(Verifier(verify), timeout=60.0), [{"id": "a", **TASK, **task}])
    return await workspaces.audit_workspaces(subject, config, 300.0)


@pytest.mark.parametrize(
    ("verify", "attack"),
    [
        (own_tests, "edited tests"),
        (collected_tests, "deleted tests"),
        (own_program, "replaced programs"),
        (first_in_path, "replaced programs"),
        (left_file, "an outcome file"),
        (status_of_hidden, "modules that end"),
    ],
)
async def test_holes_are_named(
    real: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    verify: Callable[..., Any],
    attack: str,
) -> None:
    """Each attack has a workspace of its own, so one shows what all of them would."""
    monkeypatch.setattr(workspaces, "ATTACKS", {attack: workspaces.ATTACKS[attack]})
    report = await audited(verify, real, tmp_path)
    assert report.verdict == "exploitable", report
    assert [one.attack for one in report.alarms] == [attack]


@pytest.mark.parametrize("verify", [content, said])
async def test_honest_verifiers_raise_no_alarm(
    real: str, tmp_path: Path, verify: Callable[..., Any]
) -> None:
    files = {"calc.sh": FILES["calc.sh"]}
    report = await audited(verify, real, tmp_path, files=files)
    assert report.scored == 9
    assert [one.attack for one in report.alarms] == []


async def test_hidden_tests_of_the_library(real: str, tmp_path: Path) -> None:
    task = {"tests": {"test.sh": TEST}, "test_command": ["sh", "test.sh"]}
    report = await audited(run_tests, real, tmp_path, files={"calc.sh": "add() { :; }\n"}, **task)
    assert report.verdict == "no hole found", report


async def test_hidden_tests_in_reach(real: str, tmp_path: Path) -> None:
    report = await audited(content, real, tmp_path)
    assert [one.attack for one in report.alarms] == ["answers in reach"]
