"""What a process leaves behind ends with it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

LEAVES = """
import os, signal, subprocess, sys
from agentrl.base.descendants import ending_descendants

before = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
with ending_descendants() as ended:
    bare = {"env": {"PATH": os.environ["PATH"]}, "start_new_session": True}
    popen = subprocess.Popen(["sleep", "600"], **bare)
    read, write = os.pipe()
    if os.fork() == 0:
        os.setsid()
        if os.fork() == 0:  # a daemon
            os.write(write, str(os.getpid()).encode())
            os.closerange(0, 64)
            signal.pause()
        os._exit(0)
    daemon = int(os.read(read, 16))
assert before.poll() is None
before.kill()
print(sorted(ended) == sorted([popen.pid, daemon]), daemon, popen.pid)
"""


def test_daemons_end_with_the_process_that_began_them() -> None:
    run = subprocess.run([sys.executable, "-c", LEAVES], capture_output=True, text=True, timeout=60)
    assert run.returncode == 0, run.stderr
    all_ended, *pids = run.stdout.split()
    assert all_ended == "True"
    assert not any(Path("/proc", pid).exists() for pid in pids)
