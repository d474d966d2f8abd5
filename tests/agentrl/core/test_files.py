"""Files and directories that are written as a whole."""

from __future__ import annotations

import logging
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from agentrl.core import files
from agentrl.core.files import atomic_directory, delete_directory


@pytest.mark.parametrize(("umask", "mode"), [(0o022, 0o644), (0o027, 0o640), (0o077, 0o600)])
def test_weights_have_the_permissions_of_the_files_beside_them(
    umask: int, mode: int, tmp_path: Path
) -> None:
    before = os.umask(umask)
    try:
        with atomic_directory(tmp_path / "policy") as partial:
            (partial / "config.json").write_text("{}")
            (partial / "parts").mkdir()
            for file in ("model.safetensors", "parts/model.safetensors"):
                save_file({"weight": torch.ones(1)}, partial / file)
            (partial / "secret").touch(mode=0o600)
    finally:
        os.umask(before)
    modes = {
        str(file.relative_to(tmp_path / "policy")): file.stat().st_mode & 0o777
        for file in (tmp_path / "policy").rglob("*")
        if file.is_file()
    }
    written = ("config.json", "model.safetensors", "parts/model.safetensors")
    assert modes == dict.fromkeys(written, mode) | {"secret": 0o600}


WRITER = """
import sys
from pathlib import Path
from agentrl.core.files import atomic_directory

with atomic_directory(Path(sys.argv[1])) as partial:
    (partial / "weights").write_text("half")
    print(partial.name, flush=True)
    sys.stdin.read()
"""


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_what_a_killed_process_has_left_is_deleted_at_the_next_start(
    number: signal.Signals, tmp_path: Path
) -> None:
    target, other = tmp_path / "model", tmp_path / "model.tmp-notes"
    other.mkdir()
    command = [sys.executable, "-c", WRITER, str(target)]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen(command, text=True, **pipes) as killed:
        assert killed.stdout
        left = tmp_path / killed.stdout.readline().strip()
        killed.send_signal(number)
    with subprocess.Popen(command, text=True, **pipes) as living:
        assert living.stdout
        written = tmp_path / living.stdout.readline().strip()
        assert not left.exists()
        with atomic_directory(target) as partial:
            (partial / "weights").write_text("whole")
        assert (written / "weights").read_text() == "half", "another process is writing it"
        assert (target / "weights").read_text() == "whole"
        delete_directory(target)
    assert living.returncode == 0
    assert {path.name for path in tmp_path.iterdir()} == {"model", "model.tmp-notes"}


# -- progress --------------------------------------------------------------------------------------


log = logging.getLogger("agentrl.test")


@pytest.fixture
def lines(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    found = list[str]()
    monkeypatch.setattr(files, "log_phase", lambda log, line: found.append(line))
    return found


def test_long_work_says_how_much_is_left_and_short_work_nothing(lines: list[str]) -> None:
    now = 0.0
    report = files.steps_left(log, "imitating", 100, clock=lambda: now)
    for step in range(100):
        now = 0.2 * step
        report(step)
    assert lines == [
        "imitating: 25% done, about 15 s left",
        "imitating: 50% done, about 10 s left",
        "imitating: 75% done, about 5 s left",
    ]
    lines.clear()
    report = files.steps_left(log, "imitating", 100, clock=lambda: now)
    for step in range(100):
        now += 0.04
        report(step)
    assert lines == []


def test_work_of_unknown_length_says_that_it_goes_on(
    lines: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    said = threading.Event()

    def phase(log: logging.Logger, line: str) -> None:
        lines.append(line)
        said.set()

    monkeypatch.setattr(files, "log_phase", phase)
    with files.still_at(log, "building the model", interval=0.01):
        assert said.wait(20)
    assert lines[0] == "building the model: 0 s so far"
    assert not [one for one in threading.enumerate() if one.name == "progress"]
