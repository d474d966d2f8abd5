"""An agent that answers without the gateway has not been sampled: nothing of it may be learned."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import httpx
import pytest
from aiohttp import web

from agentrl.core.config import AgentConfig, RunnerConfig
from agentrl.core.types import ErrorKind, Rollout, RolloutState, one_line
from agentrl.runners.executors.command import environment

TASK = {"input": "question"}
BODY = {"model": "gpt", "messages": [{"role": "user", "content": "hello"}]}


def failed(rollout: Rollout) -> str:
    assert rollout.failure is not None
    assert rollout.failure.kind is ErrorKind.NO_CALL
    assert rollout.rewards == []
    assert rollout.attempts == 1
    return rollout.failure.message


async def test_an_agent_that_asks_nobody_has_failed(bench: Any) -> None:
    (rollout,) = await bench.run(str.upper, TASK, calls_optional=False)
    message = failed(rollout)
    assert bench.gateway.base_url in message
    assert "agent.calls_optional" in message
    (rollout,) = await bench.run(str.upper, TASK)
    assert (rollout.state, rollout.reward()) == (RolloutState.SUCCEEDED, 1.0)


async def test_an_agent_that_asks_another_model_is_told_which(bench: Any) -> None:
    ready = httpx.Client(base_url=bench.model.base_url)  # its address was chosen before

    def agent(text: str) -> str:
        answer = ready.post("/chat/completions?key=secret", json=BODY).json()
        return str(answer["choices"][0]["message"]["content"])

    with ready:
        (rollout,) = await bench.run(agent, TASK, calls_optional=False)
    message = failed(rollout)
    assert f"called {bench.model.base_url}/chat/completions" in message
    assert "secret" not in message


async def test_a_wrong_base_url_that_raises_is_named(bench: Any) -> None:
    """A base URL in the agent's source, where nothing listens: "Connection error." says no more."""
    openai = pytest.importorskip("openai")

    def agent(text: str) -> str:
        with openai.OpenAI(base_url="http://127.0.0.1:1/v1", max_retries=0) as client:
            return str(client.chat.completions.create(**BODY))

    (rollout,) = await bench.run(agent, TASK, calls_optional=False)
    assert rollout.failure.kind is ErrorKind.AGENT
    assert "Connection error" in rollout.failure.message
    assert (
        "but called http://127.0.0.1:1/v1/chat/completions; let its client read its base URL"
        in (rollout.failure.message)
    )


HARD_CODED = """
import json, os, sys, urllib.request
body = json.dumps({"model": "m", "messages": []}).encode()
urllib.request.urlopen("http://127.0.0.1:1/v1/chat/completions", body)
"""


@pytest.mark.parametrize("fails", ["raises", "takes too long"])
async def test_a_program_that_fails_without_a_call_is_told_of_the_gateway(
    bench: Any, tmp_path: Path, fails: str
) -> None:
    """No span tells where a program in another process calls."""
    from agentrl.runners.executors.command import CommandExecutor

    source = HARD_CODED if fails == "raises" else "import time; time.sleep(60)"
    command = [sys.executable, "-c", source]
    agent, runner, url = AgentConfig(command=command), RunnerConfig(), bench.gateway.base_url
    executor = CommandExecutor(agent, runner, root=tmp_path, gateway=url)
    await executor.start()
    try:
        (rollout,) = await bench.run(executor, TASK, calls_optional=False, timeout=2.0)
    finally:
        await executor.close()
    assert rollout.failure.kind is (ErrorKind.AGENT if fails == "raises" else ErrorKind.TIMEOUT)
    assert rollout.failure.message.endswith(
        f"; the agent made no model call through the gateway at {bench.gateway.base_url}; let its"
        " client read its base URL from OPENAI_BASE_URL, and create it in the agent's own module or"
        " in a function that builds the agent"
    )


async def test_a_long_message_leaves_room_for_the_hint(bench: Any) -> None:
    def agent(text: str) -> str:
        raise ValueError("no luck " * 100)

    (rollout,) = await bench.run(agent, TASK, calls_optional=False, error_reward=0.0)
    assert rollout.rewards == []  # the policy was not asked
    assert "OPENAI_BASE_URL" in one_line(rollout.failure.message)
    assert "no luck " * 99 in rollout.failure.traceback
    (rollout,) = await bench.run(agent, TASK)  # its calls are optional
    assert "OPENAI_BASE_URL" not in rollout.failure.message


async def test_calls_that_were_all_refused_are_none(bench: Any) -> None:
    async def refuse(request: web.Request, body: Any) -> web.Response:
        return web.json_response({"error": {"message": "the prompt is too long"}}, status=400)

    bench.model.then(refuse, refuse)  # the second time without what capture adds

    def agent(text: str) -> str:
        return str(httpx.post(f"{os.environ['OPENAI_BASE_URL']}/chat/completions", json=BODY))

    (rollout,) = await bench.run(agent, TASK, calls_optional=False)
    message = failed(rollout)
    assert "1 model calls" in message
    assert "the prompt is too long" in message


CLIENT = """
import os
keys = {name: os.environ.get(name) for name in ("OPENAI_API_KEY", "GEMINI_API_KEY", "TOOL_API_KEY")}
keys["url"] = os.environ["OPENAI_BASE_URL"]
keys["org"] = os.environ.get("OPENAI_ORG_ID")

def agent(text):
    return keys
"""


async def test_a_client_made_at_import_has_the_gateways_key(
    bench: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from agentrl.core.config.infrastructure import PoolRunnerConfig
    from agentrl.runners.executors.pool import PoolExecutor

    (tmp_path / "ready_client.py").write_text(CLIENT)
    for name in ("OPENAI_API_KEY", "GEMINI_API_KEY", "TOOL_API_KEY", "OPENAI_ORG_ID"):
        monkeypatch.setenv(name, "the user's own")
    with environment(bench.gateway.base_url):
        seen = AgentConfig(pass_env=["TOOL_API_KEY"])
        pool = PoolExecutor("ready_client.py:agent", seen, PoolRunnerConfig(), root=tmp_path)
        await pool.start()
        try:
            (rollout,) = await bench.run(pool, TASK)
        finally:
            await pool.close()
    assert rollout.result == {
        "OPENAI_API_KEY": "agentrl",
        "GEMINI_API_KEY": "agentrl",
        "TOOL_API_KEY": "the user's own",
        "url": bench.gateway.base_url,
        "org": None,
    }
    assert os.environ["OPENAI_API_KEY"] == os.environ["GEMINI_API_KEY"] == "the user's own"
    with environment("http://127.0.0.1:1/v1", ["GEMINI_*"]):
        assert os.environ["GEMINI_API_KEY"] == "the user's own"
        assert os.environ["OPENAI_API_KEY"] == "agentrl"
        assert "OPENAI_ORG_ID" not in os.environ
    assert os.environ["OPENAI_ORG_ID"] == "the user's own"
    assert "ready_client" not in sys.modules
