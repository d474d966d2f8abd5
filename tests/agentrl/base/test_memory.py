"""What is known of memory: its size in a container, and whom the kernel killed for it."""

from __future__ import annotations

import logging
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from agentrl import trainer
from agentrl.algorithms.train import main
from agentrl.base import memory, processes
from agentrl.config import RunConfig
from agentrl.errors import TrainingError

GIB = 2**30


@pytest.fixture
def kernel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A machine of this process alone, with nothing in its files yet."""
    monkeypatch.setattr(memory, "PROC", tmp_path / "proc")
    monkeypatch.setattr(memory, "ROOT", tmp_path / "cgroup")
    memory.watch.cache_clear()
    (tmp_path / "proc" / "self").mkdir(parents=True)
    yield tmp_path
    memory.watch.cache_clear()


def put(file: Path, text: str) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(text)


def test_a_container_has_the_memory_of_its_innermost_limit(kernel: Path) -> None:
    machine = memory.total()
    put(kernel / "proc/meminfo", f"MemTotal: 9 kB\nMemAvailable: {3 * GIB // 1024} kB\n")
    assert memory.free() == min(machine, 3 * GIB)
    put(kernel / "proc/self/cgroup", "3:cpu:/\n0::/pod/agent\n")
    put(kernel / "cgroup/pod/memory.max", f"{2 * GIB}\n")
    put(kernel / "cgroup/pod/memory.stat", f"anon {GIB}\nfile {GIB}\n")
    put(kernel / "cgroup/pod/agent/memory.max", "max\n")
    assert memory.total() == 2 * GIB
    assert memory.free() == GIB  # files in the cache can be dropped
    put(kernel / "cgroup/memory/box/memory.limit_in_bytes", f"{GIB}\n")
    put(kernel / "cgroup/memory/box/memory.stat", f"total_rss {GIB // 4}\n")
    put(kernel / "proc/self/cgroup", "4:memory:/box\n")
    assert (memory.total(), memory.free()) == (GIB, 3 * GIB // 4)


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
            memory.watch()
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
    memory.watch().counts.append(3)  # of which the oldest is long ago
    for _ in range(memory.LATELY):
        memory.watch().counts.append(4)
    assert memory.cause_of(-9) == ""
    put(kernel / "proc/vmstat", "oom_kill 5\n")
    assert memory.cause_of(-9) == "because memory ran out"
    assert memory.cause_of(-15) == memory.cause_of(1) == ""


async def test_where_nobody_knows_it_is_perhaps_memory(kernel: Path) -> None:
    with pytest.raises(TrainingError, match="signal 9, perhaps because memory ran out"):
        await trainer._algorithm(child_that("kill -9 $$", kernel / "logs"))


def test_an_agent_killed_for_memory_says_so(kernel: Path) -> None:
    from agentrl.runners.processes import contract

    put(kernel / "proc/vmstat", "oom_kill 0\n")
    memory.watch()
    put(kernel / "proc/vmstat", "oom_kill 1\n")
    killed = "was killed by SIGKILL, because memory ran out: lower runner.processes or "
    assert contract.describe_exit(-9).startswith(killed)
    assert contract.describe_exit(-15) == "was killed by SIGTERM"


async def test_runners_killed_for_memory_are_too_many(
    kernel: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    put(kernel / "proc/vmstat", "oom_kill 0\n")
    memory.watch()
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
