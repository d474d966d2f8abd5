"""A command that is forked ends as one that is started, and never outlives who started it."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
from contextlib import closing
from pathlib import Path

from tests import warm

PARENT = """
import asyncio, subprocess, sys
from pathlib import Path

async def main():
    command = [sys.executable, "-m", "agentrl", "--help"]
    child = await asyncio.create_subprocess_exec(*command, stdout=subprocess.PIPE)
    said, _ = await child.communicate()
    print(child.returncode, said.startswith(b"Usage"))
    waiting = subprocess.Popen([*command[:3], "store", "serve", "store.db", "--port", "0"])
    print("tests.warm" in Path(f"/proc/{waiting.pid}/cmdline").read_text())
    waiting.kill()
    print(waiting.wait())
    sys.exit("enough")

asyncio.run(main())
"""


def test_output_and_exit_code_are_those_of_a_cold_process(tmp_path: Path) -> None:
    command = ["-m", "agentrl", "train", "missing.toml"]
    cold = subprocess.run(
        [sys.executable, *command], cwd=tmp_path, capture_output=True, text=True, check=False
    )
    forked = warm.run(*command, cwd=tmp_path)
    assert forked.returncode == cold.returncode == 2
    assert (forked.stdout, forked.stderr) == (cold.stdout, cold.stderr)


def test_a_program_is_given_as_text(tmp_path: Path) -> None:
    code = "import sys; print(__name__, sys.argv, sys.path[0]); sys.exit(3)"
    forked = warm.run("-c", code, "a", "b", cwd=tmp_path)
    assert forked.stdout == f"__main__ ['-c', 'a', 'b'] {tmp_path}\n"
    assert (forked.returncode, forked.stderr) == (3, "")


def test_what_it_starts_is_forked_and_its_child(tmp_path: Path) -> None:
    (tmp_path / "parent.py").write_text(PARENT)
    ended = warm.run("-m", "parent", cwd=tmp_path)
    assert ended.stdout.splitlines() == ["0 True", "True", "-9"], ended.stderr
    assert (ended.returncode, ended.stderr) == (1, "enough\n")


def test_it_is_killed_when_nobody_waits_for_it(tmp_path: Path) -> None:
    (tmp_path / "forever.py").write_text("import signal\nsignal.pause()\n")
    with closing(warm.start("-m", "forever", cwd=tmp_path)) as process:
        process.kill()
        assert process.wait(30) == -signal.SIGKILL
    with closing(warm.start("-m", "forever", cwd=tmp_path)) as process:
        handle = os.pidfd_open(process.pid)
    assert select.select([handle], [], [], 30)[0]
    os.close(handle)
