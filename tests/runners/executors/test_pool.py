"""Warm processes: when they are replaced, and what the user can mend."""

from __future__ import annotations

import asyncio
import errno
import os
import re
import select
import signal
import socket
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from agentrl.core.config import AgentConfig
from agentrl.core.config.infrastructure import PoolConfig, PoolRunnerConfig
from agentrl.core.errors import AgentRLError
from agentrl.core.types import ErrorKind, RolloutState
from agentrl.runners import execution
from agentrl.runners.executors import pool as module
from agentrl.runners.executors.pool import PoolExecutor

AGENT = """
import os

IMPORTED = os.getpid()


def build():  # called once in each process
    built = os.getpid()
    kept = []

    async def agent(doing):
        if doing == "leave":
            os._exit(3)
        if doing == "grow":
            kept.append(bytearray(os.urandom(1)) * (200 * 2**20))
        return [IMPORTED, built, os.getpid()]

    return agent
"""


def test_a_process_imports_no_gateway() -> None:
    """Two thirds of the time until it is ready were imports of HTTP, which no agent may need."""
    code = "import sys, agentrl.runners.executors.child; assert 'aiohttp' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.fixture
async def pool(tmp_path: Path) -> AsyncIterator[Any]:
    """Starts pools, and closes them."""
    made: list[PoolExecutor] = []

    async def start(
        text: str = AGENT, path: str = "pool_agent.py:build", **pool: Any
    ) -> PoolExecutor:
        (tmp_path / "pool_agent.py").write_text(text)
        optional = pool.pop("calls_optional", True)
        limit = pool.pop("memory_mb", 0)
        config = PoolRunnerConfig(memory_mb=limit, pool=PoolConfig(**{"processes": 1} | pool))
        agent = AgentConfig(pass_env=["MY_*"], env={"ADDED": "1"}, calls_optional=optional)
        made.append(PoolExecutor(path, agent, config, root=tmp_path))
        await made[-1].start()
        return made[-1]

    yield start
    for each in made:
        await each.close()


@pytest.mark.parametrize("start", ["fork", "spawn"])
async def test_imported_once_built_in_each_process(bench: Any, pool: Any, start: str) -> None:
    executor = await pool(start=start, processes=2)
    rollouts = await bench.run(executor, *[{"input": ""}] * 8, concurrency=2)
    found = [rollout.result for rollout in rollouts]
    assert len({imported for imported, _, _ in found}) == (1 if start == "fork" else 2)
    assert {built for _, built, _ in found} == {process for _, _, process in found}
    assert len({process for _, _, process in found}) == 2


async def test_a_process_is_replaced_after_so_many_rollouts(
    bench: Any, pool: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "RECYCLE_AFTER", 2)
    executor = await pool()
    rollouts = await bench.run(executor, *[{"input": ""}] * 6)
    processes = [rollout.result[2] for rollout in rollouts]
    assert [processes.count(process) for process in dict.fromkeys(processes)] == [2, 2, 2]


async def test_a_process_that_grew_is_replaced(
    bench: Any, pool: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "LARGE", 0.2)
    executor = await pool(memory_mb=1000)
    tasks = [{"input": doing} for doing in ("", "grow", "")]
    before, grown, after = [r.result[2] for r in await bench.run(executor, *tasks, concurrency=1)]
    assert before == grown != after


CHANGES = {
    "variable": "os.environ['OPENAI_BASE_URL'] = 'http://127.0.0.1:9/v1'",
    "no variable": "del os.environ['ADDED']",
    "proxy": "os.environ['HTTPS_PROXY'] = 'http://127.0.0.1:9'",
    "folder": "os.chdir('/')",
}


async def test_a_process_that_a_rollout_changed_is_replaced(bench: Any, pool: Any) -> None:
    executor = await pool(
        AGENT.replace('if doing == "leave":\n            os._exit(3)', "exec(doing)")
    )
    tasks = [{"input": doing} for code in CHANGES.values() for doing in ("", code)]
    rollouts = await bench.run(executor, *tasks, {"input": ""}, concurrency=1)
    found = [rollout.result[2] for rollout in rollouts]
    for number, what in enumerate(CHANGES):
        before, changed, after = found[2 * number : 2 * number + 3]
        assert before == changed != after, what


async def test_a_process_whose_rollouts_no_longer_call_is_replaced(bench: Any, pool: Any) -> None:
    executor = await pool(calls_optional=False)
    rollouts = await bench.run(executor, *[{"input": ""}] * 4, concurrency=1)
    first, second, third, fourth = [rollout.result[2] for rollout in rollouts]
    assert first == second != third == fourth


async def test_no_more_rollouts_at_a_time_than_there_are_places(bench: Any, pool: Any) -> None:
    executor = await pool(processes=2, rollouts=3)
    assert executor.limit == 6


async def test_nobody_is_blamed_for_a_process_that_ran_several(
    bench: Any, pool: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(execution, "MAX_LOST", 1)
    executor = await pool(
        AGENT.replace('"leave":', '"leave" and not await hold():') + HOLD, rollouts=2
    )
    tasks = [{"input": "leave"}, {"input": "leave"}]
    rollouts = await bench.run(executor, *tasks)
    for rollout in rollouts:
        assert rollout.state is RolloutState.FAILED
        assert rollout.failure.kind is ErrorKind.LOST_RUNNER
        assert "ended with exit status 3 while it ran 2 rollouts" in rollout.failure.message
        assert rollout.attempts == 2
        assert rollout.rewards == []


# Both rollouts of the process are running when it ends.
HOLD = """

import asyncio
waiting = []


async def hold():
    waiting.append(asyncio.Event())
    if len(waiting) % 2 == 0:
        waiting[-2].set()
    else:
        await waiting[-1].wait()
"""


POLLS = (
    "import threading\nthreading.Thread(target=threading.Event().wait, daemon=True,"
    " name='poller').start()\nasync def build(x): ..."
)


async def test_what_the_user_can_mend(pool: Any) -> None:
    with pytest.raises(AgentRLError, match="did you mean 'build'"):
        await pool(path="pool_agent.py:biuld")
    for text, says in (
        ("import nothing_like_this", "cannot import it"),
        ("import os\nos._exit(4)", "process ended while loading"),
        ("def build():\n    return 17", "of type 'int'"),
        (POLLS, r"started the threads poller.*runner\.pool\.start = 'spawn'"),
    ):
        (answer,) = await asyncio.gather(pool(text), return_exceptions=True)
        assert isinstance(answer, AgentRLError), (text, answer)
        assert re.search(says, str(answer)), (text, answer)


WITHHELD = """
import os

{0}

async def build(_):
    return os.environ["TAVILY_API_KEY"] if _ else 1
"""


async def test_a_variable_that_only_the_runner_has_is_named(
    bench: Any, pool: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TAVILY_API_KEY", "own")
    says = r"TAVILY_API_KEY.*pool_agent.py:4\); the runner has TAVILY_API_KEY .*"
    says += r"set agent\.pass_env = \[\"TAVILY_API_KEY\"\]"
    with pytest.raises(AgentRLError, match=says):
        await pool(WITHHELD.format("key = os.environ['TAVILY_API_KEY']"))
    executor = await pool(WITHHELD.format(""))
    failed, fine = await bench.run(executor, {"input": 1}, {"input": 0})
    assert failed.failure.message.endswith('set agent.pass_env = ["TAVILY_API_KEY"]')
    assert fine.result == 1


SLEEPER = """
import asyncio, os

async def build(seconds):
    await asyncio.sleep(seconds)
    return os.getpid()
"""


async def test_a_stopped_rollout_costs_its_process_and_nothing_else(bench: Any, pool: Any) -> None:
    executor = await pool(SLEEPER, processes=1, rollouts=2)
    tasks = [{"input": 3600}, {"input": 0}]
    hung, fine = await bench.run(executor, *tasks, timeout=0.5)
    assert hung.failure.kind is ErrorKind.TIMEOUT
    (after,) = await bench.run(executor, {"input": 0})
    assert fine.result != after.result


UNSENDABLE = """
from opentelemetry import trace

async def build(doing):
    if doing == "raise":
        raise ValueError("\\ud83d")
    if doing == "span":
        with trace.get_tracer("t").start_as_current_span("\\ud83d"):
            pass
    return "\\ud83d"
"""


async def test_what_a_process_cannot_send_holds_nobody_up(bench: Any, pool: Any) -> None:
    executor = await pool(UNSENDABLE)
    tasks = [{"input": doing} for doing in ("raise", "span", "answer")]
    raised, traced, answered = await bench.run(executor, *tasks)
    assert raised.failure.kind is traced.failure.kind is ErrorKind.AGENT
    assert raised.failure.message == "ValueError: ?"
    assert "UnicodeEncodeError" in traced.failure.message
    assert answered.result == "?"


async def test_a_process_that_sends_nonsense_is_replaced(bench: Any, pool: Any) -> None:
    code = r"""
import os

async def agent(doing):
    if doing == "disturb":
        os.write(3, b"\0\0\0\2{}")
    return os.getpid()
"""
    executor = await pool(code, "pool_agent.py:agent")
    before, disturbed, after = await bench.run(
        executor, *({"input": doing} for doing in ("", "disturb", "")), concurrency=1, timeout=5.0
    )
    assert disturbed.failure.kind is ErrorKind.AGENT
    assert "the agent's process was killed" in disturbed.failure.message
    assert after.result not in (None, before.result)


UNSTEADY = """
import os
from pathlib import Path

def build():
    if Path("{broken}").exists():
        raise ValueError("not today")

    async def agent(doing):
        return os.getpid()

    return agent
"""


async def test_a_replacement_that_does_not_load_is_tried_again(
    bench: Any, pool: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "FIRST_START_PAUSE", 0.01)
    broken = tmp_path / "broken"
    monkeypatch.setattr(module, "RECYCLE_AFTER", 1)
    executor = await pool(UNSTEADY.format(broken=broken))
    broken.touch()
    first, second = await bench.run(executor, *[{"input": ""}] * 2, timeout=0.5, max_attempts=1)
    assert first.state is RolloutState.SUCCEEDED
    assert second.failure.kind is ErrorKind.LOST_RUNNER
    assert "not today" in second.failure.message
    broken.unlink()
    (third,) = await bench.run(executor, {"input": ""})
    assert third.result != first.result


async def test_a_replacement_that_cannot_be_started_is_tried_again(
    bench: Any, pool: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "FIRST_START_PAUSE", 0.01)
    monkeypatch.setattr(module, "RECYCLE_AFTER", 1)
    executor = await pool()
    made, socketpair = list[None](), socket.socketpair

    def no_files() -> Any:
        made.append(None)
        if len(made) == 2:  # that of the launcher
            raise OSError(errno.EMFILE, "Too many open files")
        return socketpair()

    monkeypatch.setattr(socket, "socketpair", no_files)
    first, second = await bench.run(executor, *[{"input": ""}] * 2, timeout=5.0)
    assert len(made) >= 4
    assert first.result[2] != second.result[2]


GREEDY = """
import os


def agent(doing):
    if doing == "print":
        print("x" * 100_000_000)
    return "x" * 100_000_000 if doing == "answer" else dict(os.environ)
"""


@pytest.mark.parametrize("start", ["fork", "spawn"])
async def test_processes_get_no_secrets(
    bench: Any, pool: Any, monkeypatch: pytest.MonkeyPatch, start: str
) -> None:
    for name in ("AGENTRL_STORE_KEY", "PGPASSWORD", "SECRET_KEY", "MY_FLAG"):
        monkeypatch.setenv(name, "hush")
    monkeypatch.setenv("OPENAI_BASE_URL", "http://gateway/v1")
    executor = await pool(GREEDY, "pool_agent.py:agent", start=start)
    (rollout,) = await bench.run(executor, {"input": ""})
    assert [name for name, value in rollout.result.items() if value == "hush"] == ["MY_FLAG"]
    assert rollout.result["ADDED"] == "1"
    assert rollout.result["OPENAI_BASE_URL"] == "http://gateway/v1"


async def test_what_is_too_large_is_limited_and_said(
    bench: Any, pool: Any, capfd: pytest.CaptureFixture[str]
) -> None:
    executor = await pool(GREEDY, "pool_agent.py:agent")
    tasks = [{"input": doing} for doing in ("print", "answer", "")]
    printed, answered, after = await bench.run(executor, *tasks, concurrency=1)
    assert printed.state is after.state is RolloutState.SUCCEEDED
    assert "more than 16777216 bytes to its result" in answered.failure.message
    said = capfd.readouterr().err
    assert "the rest is not kept" in said
    assert len(said) < 2_000_000


LEAVES = """
import os, signal, subprocess, sys

def build():
    return agent

def agent(text):
    pids, sleep = [], [sys.executable, "-c", "import time; time.sleep(600)"]
    for start in ({"start_new_session": True}, {"env": {}, "start_new_session": True}):
        pids.append(subprocess.Popen(sleep, **start).pid)
    read, write = os.pipe()
    if os.fork() == 0:  # a daemon: another session, and no parent
        os.setsid()
        if os.fork() == 0:
            os.write(write, str(os.getpid()).encode())
            os.closerange(0, 64)
            signal.pause()
        os._exit(0)
    os.wait()
    pids.append(int(os.read(read, 16)))
    open(text, "w").write(" ".join(map(str, [os.getppid(), *pids])))
    os.kill(os.getppid(), signal.SIGKILL)
    signal.pause()
"""


@pytest.mark.parametrize("start", ["fork", "spawn"])
async def test_a_killed_supervisor_leaves_nothing(
    bench: Any, pool: Any, tmp_path: Path, start: str
) -> None:
    """Not even what has a session and no parent of its own."""
    executor = await pool(LEAVES, start=start)
    (rollout,) = await bench.run(executor, {"input": str(tmp_path / "pids")})
    assert rollout.state is RolloutState.FAILED
    pids = [int(pid) for pid in (tmp_path / "pids").read_text().split()]
    assert len(set(pids)) == 4
    try:
        for pid in pids:  # a descriptor of a process is readable once it has ended
            with suppress(ProcessLookupError):
                (ready, *_) = await asyncio.to_thread(
                    select.select, [os.pidfd_open(pid)], [], [], 10
                )
                assert ready
    finally:
        for pid in pids:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
