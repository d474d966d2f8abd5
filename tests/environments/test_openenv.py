"""A real server of OpenEnv: full, dying, and with episodes."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from agentrl.core.config.derived import EnvironmentName
from agentrl.core.errors import ConfigError
from agentrl.environments import hosted
from agentrl.environments.runner import stage
from tests.environments.openenv.served import served
from tests.environments.pages import python

pytestmark = pytest.mark.timeout(600)


def named(url: str, **options: Any) -> EnvironmentName:
    return EnvironmentName.read(
        f"openenv:{url}", {"python": str(python("openenv")), "limit": 3} | options
    )


def scripted(*said: str) -> Any:
    left = list(said)

    async def reply(role: str, messages: list[Any], tools: list[Any]) -> dict[str, Any]:
        return {"role": "assistant", "content": left.pop(0)}

    return reply


async def test_rewards_of_the_server_are_those_of_calls(tmp_path: Path) -> None:
    with served(python("openenv"), tmp_path) as (url, _):
        own = named(url)
        task = hosted.tasks(own, "train")[0]
        async with stage(own) as on:
            done = await on.play(
                task, scripted("abc", '{"massage": 1}', 'So: {"message": "abcde"}')
            )
    assert done.problem == ""
    assert done.steps == pytest.approx([0.3, -1.0, 0.5])
    assert done.outcome == pytest.approx(-0.2)


async def test_a_full_server_is_tried_again_and_then_said(tmp_path: Path) -> None:
    import websockets.sync.client as client

    with served(python("openenv"), tmp_path) as (url, _):
        own, short = named(url), named(url, wait=0.5)
        task = hosted.tasks(own, "train")[0]
        with client.connect(url.replace("http", "ws") + "/ws") as taken:
            taken.send('{"type": "reset", "data": {}}')
            taken.recv()
            async with stage(short) as on:
                full = await on.play(task, scripted("a"))
            asyncio.get_running_loop().call_later(2, taken.close)
            async with stage(own) as on:
                later = await on.play(task, scripted("a", "b", "c"))
    assert f"openenv:{url}" in full.problem
    assert "CAPACITY_REACHED" in full.problem
    assert full.outcome is None
    assert (later.problem, later.outcome) == ("", pytest.approx(0.3))


async def test_a_server_that_dies_fails_the_rollout(tmp_path: Path) -> None:
    with served(python("openenv"), tmp_path) as (url, server):
        own = named(url)
        task = hosted.tasks(own, "train")[0]

        async def reply(role: str, messages: list[Any], tools: list[Any]) -> dict[str, Any]:
            server.kill()
            server.wait()
            return {"role": "assistant", "content": "hello"}

        async with stage(own) as on:
            done = await on.play(task, reply)
    assert f"openenv:{url}: step raised" in done.problem
    assert done.outcome is None
    with pytest.raises(ConfigError, match="no OpenEnv server answers"):
        hosted.describe(named(url, episodes=3))
