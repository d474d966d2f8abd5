"""Audits of runs: the command, the process before a run, and its place in the store."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from agentrl.algorithms.hack_signs import audited
from agentrl.audit.subjects import audit_run, before_run
from agentrl.core.config import RunConfig, load
from agentrl.core.config.agents import VerifierConfig
from agentrl.core.processes import Child
from agentrl.store import open_store
from agentrl.trainer import is_audited, write_settings

TASKS = "".join(json.dumps({"input": f"Say {n}.", "answer": f"w{n}"}) + "\n" for n in range(9))
SOUND = "def verify(task, result): return float(result == task['answer'])\n"
HOLE = "def verify(task, result): return float(task['answer'] in result)\n"
ENDS = "import os\ndef verify(task, result): os.kill(os.getpid(), 9)\n"
HANGS = "import time\ndef verify(task, result): time.sleep(60)\n"
RUN = """
[agent]
path = "verifier.py:verify"
[tasks]
train = "tasks.jsonl"
[verifier]
path = "verifier.py:verify"
[policy]
model = "model"
"""


def written(folder: Path, verifier: str) -> Path:
    for name, text in {"verifier.py": verifier, "tasks.jsonl": TASKS, "run.toml": RUN}.items():
        (folder / name).write_text(text)
    return folder / "run.toml"


def command(file: Path, *options: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "agentrl", "audit", str(file), *options],
        capture_output=True, text=True, check=False, cwd=file.parent, env=dict(os.environ),
    )  # fmt: skip


@pytest.mark.parametrize(("verifier", "status"), [(SOUND, 0), (HOLE, 1)])
def test_check_is_an_exit_status(tmp_path: Path, verifier: str, status: int) -> None:
    done = command(written(tmp_path, verifier), "--check", "--json")
    assert done.returncode == status, done.stderr
    assert json.loads(done.stdout)["verdict"] == ("exploitable" if status else "no hole found")


def test_a_check_that_could_not_be_made_fails(tmp_path: Path) -> None:
    raises = "def verify(task, result): raise ValueError('an object is needed')\n"
    done = command(written(tmp_path, raises), "--check", "--json")
    assert json.loads(done.stdout)["verdict"] == "not audited"
    assert done.returncode == 1


async def test_a_run_with_judges_alone_is_not_audited(tmp_path: Path) -> None:
    config = load(written(tmp_path, SOUND))
    report = await audit_run(replace(config, verifier=VerifierConfig()), 20.0)
    assert report.verdict == "not audited"
    assert "no verifier" in report.notes[0]


async def before(tmp_path: Path, verifier: str) -> tuple[list[str], Any, str]:
    """What a run says before its first step, the stored audit, and the log of its process."""
    config = load(written(tmp_path, verifier), [f"output={tmp_path / 'out'}"])
    Path(config.output).mkdir()
    log, said = tmp_path / "audit.log", list[str]()
    child = Child("audit", ["process", "audit", str(tmp_path / "run.json")], log)
    write_settings(tmp_path / "run.json", config)
    async with open_store(config.store) as store:
        await store.open_run(config.name, {})
        await before_run(store, config, child, None, said.append)
        return said, await audited(store, config.name), log.read_text()


async def test_a_run_begins_with_one_line(tmp_path: Path) -> None:
    said, known, log = await before(tmp_path, HOLE)
    assert said == []  # its log has the line
    assert known.verdict == "exploitable"
    assert known.key == "answer"
    assert len([line for line in log.splitlines() if "WARNING" in line]) == 1


async def test_a_verifier_that_kills_ends_no_run(tmp_path: Path) -> None:
    said, known, _ = await before(tmp_path, ENDS)
    assert "ended, signal 9" in said[0]
    assert known.verdict == ""


async def test_an_audit_of_a_hanging_verifier_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("agentrl.audit.subjects.LIMIT", 4.0)
    monkeypatch.setattr("agentrl.audit.subjects.LATE", 0.0)
    said, _, log = await before(tmp_path, HANGS)
    assert said == [] or "not finished in 4 s" in said[0]
    assert "no hole found" not in log


async def test_an_object_is_audited_in_its_process(tmp_path: Path) -> None:
    config = load(written(tmp_path, SOUND))
    report = await audit_run(config, 20.0, verifier=lambda task, result: 1.0)
    assert [one.attack for one in report.alarms] == ["any answer"]


class Async:
    async def __call__(self, task: Any, result: str) -> float:
        raise AssertionError("it was called")


@pytest.mark.parametrize("verify", [Async(), Async().__call__])
async def test_an_async_object_keeps_its_event_loop(tmp_path: Path, verify: Any) -> None:
    config = load(written(tmp_path, SOUND), [f"output={tmp_path}"])
    said = list[str]()
    async with open_store(config.store) as store:
        await store.open_run(config.name, {})
        child = Child("audit", [], tmp_path / "audit.log")
        await before_run(store, config, child, verify, said.append)
    assert said[0].startswith("audit of the verifier: not made, as it is async")


def test_what_is_not_audited() -> None:
    config = load_settings({})
    assert is_audited(config)
    assert not is_audited(load_settings({"audit": {"before": False}}))
    assert not is_audited(load_settings({"steps": 0}))


def load_settings(more: dict[str, Any]) -> RunConfig:
    from agentrl.core.config import resolve

    known = {"policy": {"model": "m"}, "verifier": {"path": "v.py:verify"}}
    return resolve(known | more, source="test")
