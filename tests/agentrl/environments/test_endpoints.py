"""`agentrl.endpoint()`: the address of the rollout in which it is called, in every executor."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path
from typing import Any

import pytest

import agentrl
from agentrl.core.config import RunConfig, resolve
from agentrl.core.errors import AgentError, PolicyError
from agentrl.core.types import RolloutState
from agentrl.environments import Endpoint
from tests.runners.conftest import Bench
from tests.runners.executors.conftest import ELSEWHERE
from tests.runners.executors.conftest import docker as docker
from tests.runners.executors.conftest import kubernetes as kubernetes
from tests.runners.executors.conftest import make as make

HERE = Path(__file__).parent


def settings(kind: str) -> RunConfig:
    command = {"command": [sys.executable, str(HERE / "asking_agent.py")]}
    agent = {"path": "asking_agent.py:agent"} if kind in ("async", "threads", "pool") else command
    runner: dict[str, Any] = {"executor": kind}
    runner |= {"pool": {"processes": 2}} if kind == "pool" else {}
    runner |= (
        {**ELSEWHERE, kind: {"image": "agent", "network": "agents"}} if kind == "container" else {}
    )
    data = {"name": "test", "root": str(HERE), "agent": agent, "runner": runner}
    return resolve(data, source="test")


@pytest.mark.parametrize("kind", ["async", "threads", "pool", "command", "container"])
async def test_calls_by_any_client_thread_or_process_are_the_rollouts_own(
    bench: Bench, make: Any, kind: str
) -> None:
    executor = await make(kind, config=settings(kind), root=HERE)
    tasks = [{"input": f"task {index}"} for index in range(3)]
    rollouts = await bench.run(executor, *tasks, calls_optional=False)
    for rollout, task in zip(rollouts, tasks, strict=True):
        assert rollout.state is RolloutState.SUCCEEDED, rollout.failure
        ways = [f"echo {task['input']} {way}" for way in ("async", "sync", "child", "thread")]
        assert rollout.result == ways
        calls = (await bench.store.trace(rollout.id)).transitions
        assert [bytes(list(call.completion)).decode() for call in calls] == ways
        assert [call.role for call in calls] == ["agent", "critic", "agent", "agent"]


async def test_outside_of_rollouts_it_is_an_error(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(AgentError, match="of the rollout in which it is called, and this is none"):
        agentrl.endpoint()
    # A trace that somebody else began is no rollout.
    monkeypatch.setenv("TRACEPARENT", f"00-{'1' * 32}-{'2' * 16}-01")
    with pytest.raises(AgentError):
        agentrl.endpoint()


async def test_a_server_that_serves_all_rollouts_is_in_none(bench: Bench) -> None:
    found = asyncio.Queue[str]()

    async def serve(reader: Any, writer: Any) -> None:
        try:
            found.put_nowait(agentrl.endpoint().url)
        except AgentError as error:
            found.put_nowait(str(error))
        writer.close()

    async def agent(_: Any) -> str:
        server = await asyncio.start_server(serve, "127.0.0.1", 0)
        _, writer = await asyncio.open_connection(*server.sockets[0].getsockname())
        said = await found.get()
        writer.close()
        server.close()
        return said

    (rollout,) = await bench.run(agent, {"input": ""})
    assert "and this is none" in str(rollout.result)


async def test_it_ends_with_its_rollout(bench: Bench) -> None:
    kept: list[Endpoint] = []

    async def agent(text: str) -> str:
        kept.append(agentrl.endpoint())
        return str((await kept[0].chat([{"role": "user", "content": text}]))["content"])

    (rollout,) = await bench.run(agent, {"input": "x"})
    assert rollout.result == "echo x"
    with pytest.raises(PolicyError, match=r"^a model call failed: 403, [^{]*has ended[^}]*$"):
        await kept[0].chat([{"role": "user", "content": "late"}])
    with pytest.raises(PolicyError, match="has ended"):
        await asyncio.to_thread(kept[0].chat_sync, [{"role": "user", "content": "late"}])


async def test_a_model_that_cannot_be_reached_is_a_sentence() -> None:
    nobody = Endpoint("http://127.0.0.1:9/a/x/v1", "key")
    for ask in (nobody.chat, lambda said: asyncio.to_thread(nobody.chat_sync, said)):
        with pytest.raises(PolicyError, match="a model call failed: ConnectError"):
            await ask([])


def test_roles_are_in_the_path() -> None:
    own = Endpoint("http://h:1/a/x/v1", "key")
    assert own.role("user").url == "http://h:1/a/x/user/v1"
    assert own.role("user").role("the judge/2").url == "http://h:1/a/x/the%20judge%2F2/v1"
    with pytest.raises(ValueError, match="a role needs a name"):
        own.role("")
