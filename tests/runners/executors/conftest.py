"""Every executor behind one fixture, with the same agent in it."""

from __future__ import annotations

import asyncio
import os
import select
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from agentrl.core.config import RunConfig, resolve
from agentrl.runners.executors import Executor, containers
from agentrl.runners.executors.factory import make_executor

HERE = Path(__file__).parent
PYTHON = ("async", "threads", "pool")
ELSEWHERE = {"host": "0.0.0.0", "advertise": "127.0.0.1"}
Make = Callable[..., Awaitable[Executor]]


def settings(kind: str, **runner: Any) -> RunConfig:
    """A run file for the contract's agent."""
    python = {"path": "contract_agent.py:agent"}
    command = {"command": [sys.executable, str(HERE / "contract_agent.py")]}
    agent = python if kind in PYTHON else command
    runner = {"executor": kind} | ({"pool": {"processes": 1}} if kind == "pool" else {}) | runner
    if kind in ("container", "kubernetes"):
        own = {"network": "agents"} if kind == "container" else {}
        runner = {**ELSEWHERE, kind: {"image": "agent", **own}} | runner
    data = {
        "name": "test",
        "root": str(HERE),
        "agent": agent,
        "verifier": {"path": "contract_agent.py:verify"},
        "runner": runner,
    }
    return resolve(data, source="test")


@pytest.fixture(autouse=True)
def one_warm_container(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tests count containers."""
    monkeypatch.setattr(containers, "WARM", 1)


@pytest.fixture
def docker(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A docker command line on the PATH; the file in which it records what it is asked."""
    folder = tmp_path / "bin"
    folder.mkdir()
    program = folder / "docker"
    script = HERE / "fake_docker.py"
    program.write_text(f'#!/bin/sh\nexec {sys.executable} -S {script} "$@"\n')
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")
    monkeypatch.setenv("DOCKER_LOG", str(tmp_path / "docker.log"))
    return tmp_path / "docker.log"


@pytest.fixture
async def kubernetes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Any]:
    from tests.runners.executors.fake_kubernetes import FakeKubernetes

    fake = FakeKubernetes()
    monkeypatch.setenv("KUBECONFIG", str(await fake.start(tmp_path)))
    location = "kubernetes_asyncio.config.kube_config.KUBE_CONFIG_DEFAULT_LOCATION"
    monkeypatch.setattr(location, os.environ["KUBECONFIG"])  # it is read once, at the import
    yield fake
    await fake.stop()


@pytest.fixture
async def make(bench: Any, docker: Path, kubernetes: Any) -> AsyncIterator[Make]:
    """Makes started executors, and closes them."""
    made: list[Executor] = []

    async def start(
        kind: str, *, config: RunConfig | None = None, root: Path = HERE, **runner: Any
    ) -> Executor:
        executor = make_executor(
            config or settings(kind, **runner),
            root=root,
            gateway=bench.gateway.base_url,
            runner="test",
        )
        made.append(executor)
        await executor.start()
        return executor

    yield start
    for executor in made:
        await executor.close()


class Hanging:
    """A task on which the agent hangs, what it says meanwhile, and what it leaves behind."""

    def __init__(self, folder: Path) -> None:
        self.pids, self.until, says = folder / "pids", folder / "until", folder / "says"
        os.mkfifo(self.until)
        os.mkfifo(says)
        self._says = os.open(says, os.O_RDWR)  # so that writing to it never waits
        self.input: dict[str, Any] = {"do": "hang", "pids": str(self.pids), "says": str(says)}

    async def says(self, words: int = 1) -> str:
        """Its next words, a line each: at least so many."""
        said = ""
        while said.count("\n") < words:
            said += await asyncio.to_thread(self._read)
        return said.strip()

    async def left(self) -> list[int]:
        """Processes of the agent that do not end."""
        pids = {int(line) for line in self.pids.read_text().split()} - {os.getpid()}
        return [pid for pid in pids if not await asyncio.to_thread(_ends, pid)]

    def close(self) -> None:
        os.close(self._says)

    def _read(self) -> str:
        assert _readable(self._says), "the agent said nothing"
        return os.read(self._says, 100).decode()


@pytest.fixture
def hanging(tmp_path: Path) -> Iterator[Hanging]:
    hanging = Hanging(tmp_path)
    yield hanging
    hanging.close()


def _readable(fd: int) -> bool:
    poll = select.poll()
    poll.register(fd, select.POLLIN)
    return bool(poll.poll(20_000))


def _ends(pid: int) -> bool:
    try:
        fd = os.pidfd_open(pid)
    except ProcessLookupError:
        return True
    try:
        return _readable(fd)
    finally:
        os.close(fd)
