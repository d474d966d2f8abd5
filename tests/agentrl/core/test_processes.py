"""What child processes are started with."""

from __future__ import annotations

import ctypes
import logging
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from agentrl import trainer
from agentrl.algorithms.train import main
from agentrl.core import processes
from agentrl.core.config import RunConfig
from agentrl.core.errors import AgentRLError, TrainingError
from agentrl.core.processes import (
    ERROR_MARK,
    PARENT,
    Child,
    Ending,
    environment,
    keep_alive,
    keep_running,
    run_blocking,
)


def test_threads_soon_sleep_while_they_wait_unless_told_otherwise(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delenv("GOMP_SPINCOUNT", raising=False)
    assert environment()["GOMP_SPINCOUNT"] == "20000"
    assert environment()["MKL_CBWR"].endswith("STRICT")
    monkeypatch.setenv("GOMP_SPINCOUNT", "7")
    assert environment()["GOMP_SPINCOUNT"] == "7"


def test_a_child_knows_its_parent_and_all_that_the_parent_knows(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("AGENTRL_STORE_TOKEN", "secret")
    monkeypatch.setenv(PARENT, "1")
    made = environment()
    assert made[PARENT] == str(os.getpid())
    assert made["AGENTRL_STORE_TOKEN"] == "secret"


async def test_a_usage_error_without_a_marked_line_ends_a_runner(tmp_path: Path) -> None:
    """The exit code is that of a message for the user, which only the log has."""
    child, endings = Child("runner", ["no-such-command"], tmp_path / "runner.log"), list[Ending]()

    async def after(ending: Ending) -> float | None:
        endings.append(ending)
        return 0.0 if ending.number == 1 else None

    await keep_running(child, after)
    assert [(end.number, end.code, end.error) for end in endings] == [(1, 2, ""), (2, 2, "")]
    assert endings[0].reason == "exit code 2"

    async def count_ended() -> int:
        return 0

    with pytest.raises(AgentRLError, match=f"^see {child.log}$"):
        await keep_alive(child, count_ended)
    child.log.write_text(f"{child.log.read_text()}{ERROR_MARK}no model\n")
    with pytest.raises(AgentRLError, match=r"^no model$"):
        await keep_alive(child, count_ended)


def test_the_error_that_ended_a_process_is_read_from_its_log(tmp_path: Path) -> None:
    child = Child("algorithm", [], tmp_path / "algorithm.log")
    child.log.write_text("INFO started\n")
    assert child.last_exception() is None
    first = "Traceback (most recent call last):\n  File 'a.py', line 1, in f\nKeyError: 'old'\n"
    last = "Traceback (most recent call last):\n  File 'b.py', line 2, in g\n    x.y\n      ^^\n"
    child.log.write_text(f"{first}INFO went on\n{last}AttributeError: no attribute 'y'\nINFO bye\n")
    assert child.last_exception() == "AttributeError: no attribute 'y'"


# -- what a process leaves behind ends with it -----------------------------------------------------


LEAVES = """
import os, signal, subprocess, sys
from agentrl.core.processes import ending_descendants

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


# -- coroutines from blocking code -----------------------------------------------------------------


async def fail() -> None:
    raise ValueError("the user's error")


def test_an_error_has_no_other_exception_as_its_context() -> None:
    """Else a traceback shows first that no event loop was running, which tells a user nothing."""
    with pytest.raises(ValueError, match="the user's error") as failed:
        run_blocking(fail())
    assert failed.value.__context__ is None


async def test_it_also_runs_in_an_event_loop_as_in_a_notebook() -> None:
    with pytest.raises(ValueError, match="the user's error"):
        run_blocking(fail())


# -- what is known of memory: its size in a container, and whom the kernel killed for it -----------


GIB = 2**30


@pytest.fixture
def kernel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A machine of this process alone, with nothing in its files yet."""
    monkeypatch.setattr(processes, "PROC", tmp_path / "proc")
    monkeypatch.setattr(processes, "ROOT", tmp_path / "cgroup")
    processes.kill_watch.cache_clear()
    (tmp_path / "proc" / "self").mkdir(parents=True)
    yield tmp_path
    processes.kill_watch.cache_clear()


def put(file: Path, text: str) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(text)


def test_a_container_has_the_memory_of_its_innermost_limit(kernel: Path) -> None:
    machine = processes.total_memory()
    put(kernel / "proc/meminfo", f"MemTotal: 9 kB\nMemAvailable: {3 * GIB // 1024} kB\n")
    assert processes.free_memory() == min(machine, 3 * GIB)
    put(kernel / "proc/self/cgroup", "3:cpu:/\n0::/pod/agent\n")
    put(kernel / "cgroup/pod/memory.max", f"{2 * GIB}\n")
    put(kernel / "cgroup/pod/memory.stat", f"anon {GIB}\nfile {GIB}\n")
    put(kernel / "cgroup/pod/agent/memory.max", "max\n")
    assert processes.total_memory() == 2 * GIB
    assert processes.free_memory() == GIB  # files in the cache can be dropped
    put(kernel / "cgroup/memory/box/memory.limit_in_bytes", f"{GIB}\n")
    put(kernel / "cgroup/memory/box/memory.stat", f"total_rss {GIB // 4}\n")
    put(kernel / "proc/self/cgroup", "4:memory:/box\n")
    assert (processes.total_memory(), processes.free_memory()) == (GIB, 3 * GIB // 4)


# Files that say that the kernel has killed a process.
COUNTERS = [
    ("proc/vmstat", "pgfault 8\noom_kill {}\n", ""),
    ("cgroup/pod/memory.events", "max 3\noom 1\noom_kill {}\n", "0::/pod\n"),
    ("cgroup/memory/pod/memory.oom_control", "under_oom 0\noom_kill {}\n", "7:memory:/pod\n"),
]


def child_that(does: str, folder: Path) -> Any:
    """A child process of `does`, a shell script."""

    class Child(processes.Child):
        async def start(self) -> None:
            processes.kill_watch()
            self.process = await processes.asyncio.create_subprocess_exec("sh", "-c", does)

    folder.mkdir(exist_ok=True)
    log = folder / "algorithm.log"
    log.write_text(
        "10:00 PHASE agentrl.algorithm: memory: about 9 of 8 GiB: weights 9; set what is smaller "
        "of learner.token_budget\n"
    )
    return Child("algorithm", [], log)


@pytest.mark.parametrize(("file", "text", "group"), COUNTERS)
async def test_a_trainer_killed_for_memory_says_so_with_what_to_lower(
    kernel: Path, file: str, text: str, group: str
) -> None:
    put(kernel / "proc/self/cgroup", group)
    put(kernel / file, text.format(4))
    script = f"printf '{text.format(5)}' > {kernel / file}; kill -9 $$"
    with pytest.raises(TrainingError) as caught:
        await trainer._algorithm(child_that(script, kernel / "logs"))
    said = str(caught.value)
    assert "ended with signal 9, because memory ran out (the estimate was about 9 of 8 GiB" in said
    assert said.count("learner.token_budget") == 1


async def test_a_signal_from_a_person_is_not_called_memory(kernel: Path) -> None:
    put(kernel / "proc/vmstat", "oom_kill 4\n")
    with pytest.raises(TrainingError, match="ended with signal 9; nothing is lost"):
        await trainer._algorithm(child_that("kill -9 $$", kernel / "logs"))
    processes.kill_watch().counts.append(3)  # of which the oldest is long ago
    for _ in range(processes.KILL_DELAY):
        processes.kill_watch().counts.append(4)
    assert processes.cause_of(-9) == ""
    put(kernel / "proc/vmstat", "oom_kill 5\n")
    assert processes.cause_of(-9) == "because memory ran out"
    assert processes.cause_of(-15) == processes.cause_of(1) == ""


async def test_where_nobody_knows_it_is_perhaps_memory(kernel: Path) -> None:
    with pytest.raises(TrainingError, match="signal 9, perhaps because memory ran out"):
        await trainer._algorithm(child_that("kill -9 $$", kernel / "logs"))


def test_an_agent_killed_for_memory_says_so(kernel: Path) -> None:
    from agentrl.runners.executors import command

    put(kernel / "proc/vmstat", "oom_kill 0\n")
    processes.kill_watch()
    put(kernel / "proc/vmstat", "oom_kill 1\n")
    killed = "was killed by SIGKILL, because memory ran out: lower runner.processes or "
    assert command.describe_exit(-9).startswith(killed)
    assert command.describe_exit(-15) == "was killed by SIGTERM"


async def test_runners_killed_for_memory_are_too_many(
    kernel: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    put(kernel / "proc/vmstat", "oom_kill 0\n")
    processes.kill_watch()
    put(kernel / "proc/vmstat", "oom_kill 1\n")
    monkeypatch.setattr(processes, "RESTART_PAUSE", 0.0)

    async def nobody() -> int:
        return 0

    runner = child_that("kill -9 $$", kernel / "logs")
    with caplog.at_level(logging.WARNING), pytest.raises(TrainingError, match="20 times") as caught:
        await processes.keep_alive(runner, nobody)
    assert "because memory ran out: lower runner.processes" in str(caught.value)
    assert "because memory ran out; lower runner.processes" in caplog.messages[0]


@pytest.mark.parametrize(
    "error",
    [
        MemoryError(),
        RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried 9 GB"),
        torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 9 GiB"),
    ],
)
def test_an_algorithm_process_without_memory_says_what_to_lower(
    error: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise error

    monkeypatch.setattr(main, "asyncio", SimpleNamespace(run=fail))
    monkeypatch.setattr(main, "run", lambda *_, **__: None)
    with pytest.raises(TrainingError, match=r"memory ran out \(.*learner\.token_budget"):
        main.main(RunConfig())


ARENAS = """
import ctypes, sys, threading
from agentrl.core.processes import share_freed_memory

libc = ctypes.CDLL(None)
if "shared" in sys.argv:
    share_freed_memory()
libc.malloc.restype = ctypes.c_void_p
gate = threading.Barrier(4)


def allocate():
    gate.wait()
    kept = [libc.malloc(1000) for _ in range(1000)]


threads = [threading.Thread(target=allocate) for _ in range(4)]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
libc.fopen.restype = ctypes.c_void_p
file = ctypes.c_void_p(libc.fopen(sys.argv[1].encode(), b"w"))
libc.malloc_info(0, file)
libc.fclose(file)
"""


@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "malloc_info"), reason="needs glibc")
def test_threads_share_the_memory_that_is_freed(tmp_path: Path) -> None:
    def arenas(*how: str) -> int:
        file = tmp_path / "arenas.xml"
        command = [sys.executable, "-c", ARENAS, str(file), *how]
        variables = {key: value for key, value in os.environ.items() if key != "MALLOC_ARENA_MAX"}
        subprocess.run(command, check=True, env=variables)
        return file.read_text().count("<heap nr=")

    assert arenas("shared") == 1 < arenas()
