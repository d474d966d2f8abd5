"""Agents in real containers: the gateway without a network, limits, workspaces, what is left."""

from __future__ import annotations

import asyncio
import contextlib
import os
import random
import re
import signal
import sys
import tempfile
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from agentrl.core.config import RunConfig, resolve
from agentrl.core.errors import ConfigError
from agentrl.core.types import ErrorKind, RolloutState
from agentrl.runners.executors import containers
from agentrl.runners.executors.containers import ContainerExecutor
from agentrl.runners.executors.factory import make_executor
from agentrl.runners.executors.keeper import OWNER, PREFIX
from agentrl.runners.workspace.folders import Workspace, Workspaces
from tests.runners.executors.real import ENGINE, left_of, needs_podman, podman, until_none_is_left
from tests.runners.executors.real import real as real

pytestmark = needs_podman
ASK = """
body='{"model": "policy", "messages": [{"role": "user", "content": '"$AGENTRL_TASK"'}]}'
wget -qO- --header "Authorization: Bearer $OPENAI_API_KEY" --post-data "$body" \\
    --header "Content-Type: application/json" "$OPENAI_BASE_URL/chat/completions" >/tmp/said
grep -o 'echo [a-z]*' /tmp/said
ls /sys/class/net
"""
# The task's input is a program, a text without quotes and line breaks: its JSON is that in quotes.
RUN = 'task=${AGENTRL_TASK#?}; eval "${task%?}"'
KILLS = 6
Start = Callable[..., Awaitable[ContainerExecutor]]


def configured(image: str, program: str = RUN, more: Any = None, **runner: Any) -> RunConfig:
    container = {"image": image, "cli": ENGINE} | runner.pop("container", {})
    agent = {"command": ["sh", "-c", program]}
    runner = {"executor": "container", "container": container} | runner
    data = {"name": "t", "agent": agent, "runner": runner, **(more or {})}
    return resolve(data, source="test")


@pytest.fixture
async def start(bench: Any, real: str, tmp_path: Path) -> AsyncIterator[Start]:
    """Starts executors; of those that are closed no container is left."""
    made: list[ContainerExecutor] = []

    async def begin(program: str = RUN, more: Any = None, **runner: Any) -> ContainerExecutor:
        config = configured(real, program, more, **runner)
        url = bench.gateway.base_url
        executor = make_executor(config, root=tmp_path, gateway=url, runner="test")
        assert isinstance(executor, ContainerExecutor)
        made.append(executor)
        await executor.start()
        return executor

    yield begin
    for executor in made:
        owner = executor._containers.cli.owner if executor._containers.cli.alive else "none"
        await executor.close()
        assert left_of(owner) == []


async def test_an_agent_calls_the_model_without_a_network(bench: Any, start: Start) -> None:
    executor = await start(ASK)
    rollouts = await bench.run(executor, {"input": "a"}, {"input": "b"})
    for rollout, text in zip(rollouts, ("a", "b"), strict=True):
        assert rollout.state is RolloutState.SUCCEEDED, rollout.failure
        (call,) = (await bench.store.trace(rollout.id)).transitions
        assert call.messages[0]["content"] == text
        assert rollout.result == f"echo {text}\nlo"


async def test_on_the_hosts_network_too(bench: Any, start: Start) -> None:
    (rollout,) = await bench.run(await start(ASK, container={"network": "host"}), {"input": "a"})
    assert rollout.state is RolloutState.SUCCEEDED, rollout.failure
    assert rollout.result.startswith("echo a\n")


async def test_every_rollout_has_a_new_container(bench: Any, start: Start) -> None:
    executor = await start("cat /mark 2>/dev/null; echo used > /mark; cat")
    rollouts = await bench.run(executor, *({"input": "x"} for _ in range(4)), concurrency=2)
    assert [rollout.result for rollout in rollouts] == ["x"] * 4


HOSTILE = {
    "forks": ("bomb() { bomb | bomb & }; bomb; sleep 2; echo did", None),
    "kills its parent": ("kill -9 1; kill 1; kill -9 -1; kill -9 $PPID; echo did", None),
    "fills the disk": (
        "dd if=/dev/zero of=/big bs=1M count=3000; sleep 20; echo did",
        "wrote more",
    ),
    "fills the memory": ("x=$(head -c 300m /dev/zero | tr a-z b | tail -n 1); echo did", "60 MB"),
}


@pytest.mark.parametrize("what", HOSTILE)
async def test_a_hostile_agent_hurts_nobody_else(
    bench: Any, start: Start, what: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A neighbour works at the same time, and the next rollout afterwards."""
    program, says = HOSTILE[what]
    monkeypatch.setattr(containers, "DISK_MB", 200)
    executor = await start(container={"options": ["--pids-limit=50"]}, memory_mb=60)
    hostile, fine, after = await bench.run(
        executor,
        *({"input": text} for text in (program, "sleep 2; echo fine", "echo fine")),
        concurrency=2,
        timeout=25.0,
    )
    for rollout in (fine, after):
        assert (rollout.failure, rollout.result) == (None, "fine")
    if hostile.failure is None:
        assert hostile.result == "did"
    else:
        assert hostile.failure.kind in (ErrorKind.AGENT, ErrorKind.TIMEOUT)
        assert says is None or says in hostile.failure.message
        assert hostile.rewards == []


async def test_a_container_is_gone_when_its_time_is_over(
    bench: Any, start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(containers, "WARM", 0)
    executor = await start("(sleep 1000 &); sleep 1000")
    (rollout,) = await bench.run(executor, {"input": "x"}, timeout=3.0)
    assert rollout.failure.kind is ErrorKind.TIMEOUT, rollout.failure
    await until_none_is_left(executor._containers.cli.owner)


async def test_a_container_that_somebody_removed_is_not_the_agents_failure(
    bench: Any, start: Start
) -> None:
    executor = await start("sleep 1000")

    async def remove() -> None:
        while not executor._containers._taken:  # noqa: ASYNC110
            await asyncio.sleep(0.05)
        await asyncio.sleep(1.0)  # the agent runs
        for name in list(executor._containers._taken):
            await asyncio.to_thread(podman, "rm", "--force", name)

    removing = asyncio.create_task(remove())
    (rollout,) = await bench.run(executor, {"input": "x"}, max_attempts=1)
    await removing
    assert rollout.failure.kind is ErrorKind.LOST_RUNNER
    assert "the container is gone" in rollout.failure.message


CHANGE = "cat calc.txt; echo changed > calc.txt; echo new > new.txt; pwd"


async def test_a_workspace_in_a_container(
    bench: Any, start: Start, real: str, tmp_path: Path
) -> None:
    """The agent changes its files; the verifier finds them where they were, and tests them in
    another container."""
    more = {"workspace": {"source": "task.files", "sandbox": "container"}}
    executor = await start(CHANGE, more)
    spaces = Workspaces(
        configured(real, CHANGE, more), root=tmp_path, gateway=bench.gateway.base_url
    )
    await spaces.start()
    seen: list[Any] = []

    async def verify(result: Any, workspace: Workspace) -> float:
        done = await workspace.run(["sh", "-c", "cat calc.txt new.txt; pwd; ls /sys/class/net"])
        seen.append((result, str(workspace.path), workspace.diff(), done))
        return 1.0

    try:
        task = {"input": "x", "files": {"calc.txt": "old\n"}}
        rollouts = await bench.run(executor, task, task, verifier=verify, workspaces=spaces)
    finally:
        await spaces.close()
    for rollout in rollouts:
        assert (rollout.failure, rollout.reward()) == (None, 1.0)
    assert len({path for _, path, _, _ in seen}) == 2
    for result, path, diff, done in seen:
        assert result == f"old\n{path}"
        assert "+changed" in diff
        assert "+new" in diff
        assert done == (0, f"changed\nnew\n{path}\nlo\n", "")


async def test_an_agent_of_its_own_user_and_folder(bench: Any, start: Start) -> None:
    executor = await start("id -u; pwd", container={"options": ["--user", "65534"]})
    (rollout,) = await bench.run(executor, {"input": "x"})
    assert rollout.result == "65534\n/"


def folders() -> set[str]:
    """The owners of the keepers' folders on this machine."""
    found = set()
    for file in Path(tempfile.gettempdir()).glob(f"{PREFIX}*/{OWNER}"):
        with contextlib.suppress(FileNotFoundError):
            found.update(file.read_text().split())
    return found


@pytest.mark.parametrize("keeper_dies", [pytest.param(False, marks=pytest.mark.slow), True])
async def test_a_killed_runner_leaves_no_container(real: str, keeper_dies: bool) -> None:
    for _ in range(1 if keeper_dies else KILLS):
        runner = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "tests.runners.executors.real_runner", real),
            stdout=asyncio.subprocess.PIPE,
            start_new_session=True,
        )
        assert runner.stdout is not None
        owner = (await runner.stdout.readline()).decode().strip()
        await asyncio.sleep(random.uniform(0.0, 2.0))
        if keeper_dies:
            while not left_of(owner):  # noqa: ASYNC110
                await asyncio.sleep(0.05)
            os.kill(int(owner.split("/")[2]), signal.SIGKILL)
            os.killpg(runner.pid, signal.SIGKILL)
            await runner.wait()
            following = await asyncio.create_subprocess_exec(
                *(sys.executable, "-m", "tests.runners.executors.real_runner", real)
            )
        else:
            os.killpg(runner.pid, signal.SIGKILL)
            await runner.wait()
        try:
            await until_none_is_left(owner)
            async with asyncio.timeout(30.0):
                while owner in folders():  # noqa: ASYNC110 - its keeper ends after the containers
                    await asyncio.sleep(0.1)
            assert keeper_dies or left_of(owner) == []  # nor one that was being started
        finally:
            if keeper_dies:
                following.kill()
                await following.wait()


async def test_an_image_that_does_not_exist_is_a_sentence(bench: Any, start: Start) -> None:
    with pytest.raises(ConfigError, match="the image 'localhost/none:1'") as raised:
        await start(container={"image": "localhost/none:1"})
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (["--volume", "/proc/no/folder:/x"], "cannot start.*no such file"),
        (["--no-such"], "--no-such"),
    ],
)
async def test_a_container_that_cannot_start_fails_its_rollout(
    bench: Any, start: Start, options: list[str], says: str
) -> None:
    executor = await start(container={"options": options})
    (rollout,) = await bench.run(executor, {"input": "x"}, error_reward=-1.0, max_attempts=1)
    assert rollout.failure.kind is ErrorKind.LOST_RUNNER
    assert "\n" not in rollout.failure.message
    assert rollout.rewards == []
    assert re.search(says, rollout.failure.message)
