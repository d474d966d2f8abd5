"""A runner as a process and as a thread."""

from __future__ import annotations

import asyncio
import os
import re
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest

from agentrl.core.config import AgentConfig, RunConfig
from agentrl.core.errors import ConfigError, Unavailable
from agentrl.core.types import ENDED, NewRollout, PolicyVersion, RolloutState
from agentrl.runners import main
from agentrl.runners.executors.command import environment
from agentrl.runners.main import RunnerThread, attempt_runner
from tests import factories
from tests.runners.conftest import Start
from tests.store.conftest import _serving

RUN = "main"
AGENT = """
import os
import httpx

URL = os.environ["OPENAI_BASE_URL"]  # known when the module is imported, as clients need it
client = httpx.AsyncClient(timeout=60)


async def agent(text):
    answer = await client.post(f"{URL}/chat/completions", json={"messages": [{"content": text}]})
    return answer.raise_for_status().json()["choices"][0]["message"]["content"]


def verify(task, result):
    return float(task["input"] in result)
"""
TASK = {"input": "x", "files": {"old": "x"}}
KEYS = f"admin:admin-secret\nrunner@{RUN}:runner-secret"


@pytest.fixture
def config(tmp_path: Path) -> RunConfig:
    (tmp_path / "main_agent.py").write_text(AGENT)
    return factories.config(
        tmp_path,
        name=RUN,
        agent={"path": "main_agent.py:agent"},
        verifier={"path": "main_agent.py:verify"},
        runner={"lease": 60.0, "drain": 0.1},
    )


async def test_a_store_that_is_away_for_a_while_hides_no_end(
    store: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    stop, looks = asyncio.Event(), 0

    async def away(*given: Any, **named: Any) -> Any:
        nonlocal looks
        looks += 1
        if looks > 1:
            stop.set()
        raise Unavailable("the store is away")

    monkeypatch.setattr(main, "END_CHECK_INTERVAL", 0.0)
    for verb in ("steps", "wait"):
        monkeypatch.setattr(store, verb, away)
    await main._stop_at_end(store, RUN, 1, stop)


async def open_run(store: Any, model: Any, config: RunConfig) -> None:
    await store.open_run(RUN, msgspec.to_builtins(config))
    await store.publish(
        PolicyVersion(run=RUN, policy="policy", version=0, base_url=model.base_url, model="tiny")
    )


async def enqueue(store: Any, *names: str) -> None:
    rollouts = [
        NewRollout(id=name, run=RUN, group=name, index=0, task={"input": name}) for name in names
    ]
    await store.enqueue(rollouts)


def holds(asked: asyncio.Event) -> Callable[..., Any]:
    """The model call of the next rollout never ends."""

    async def hold(request: Any, body: Any) -> None:
        asked.set()
        await asyncio.Event().wait()

    return hold


async def test_a_process_works_and_drains_on_sigterm(
    store: Any, model: Any, config: RunConfig, runner: Start
) -> None:
    process = await runner(RUN)  # before the run exists
    await open_run(store, model, config)
    await enqueue(store, "a", "b", "c")
    for name in ("a", "b", "c"):
        assert await store.settled(name, timeout=60)
    assert [rollout.reward() for rollout in await store.rollouts(RUN)] == [1.0] * 3

    asked = asyncio.Event()
    model.then(holds(asked))
    await enqueue(store, "d")
    await asked.wait()
    process.send_signal(signal.SIGTERM)
    assert await process.wait() == 0
    (attempt,) = await store.claim(1, runner="next", lease=60.0, run=RUN)
    assert (attempt.rollout.id, attempt.fence) == ("d", 2)


@pytest.mark.parametrize("over_http", [False, True])
async def test_a_process_ends_when_its_run_has_ended(
    store: Any, model: Any, config: RunConfig, runner: Start, over_http: bool
) -> None:
    """Also one that has a runner's key alone, as on another machine."""
    config = msgspec.structs.replace(config, steps=3)
    await open_run(store, model, config)
    await store.log(RUN, 2, {ENDED: 1.0})  # it had fewer steps then
    with _serving(store.url, KEYS) as address:
        url = address.replace("//", "//runner-secret@") if over_http else store.url
        process = await runner(RUN, url)
        await enqueue(store, "a")
        await store.settled("a")
        assert process.returncode is None
        await store.log(RUN, 3, {ENDED: 1.0})
        assert await asyncio.wait_for(process.wait(), 60) == 0


async def test_a_killed_runner_loses_no_rollout(
    store: Any, model: Any, config: RunConfig, runner: Start
) -> None:
    short = msgspec.structs.replace(config.runner, lease=0.5)
    await open_run(store, model, msgspec.structs.replace(config, runner=short))
    asked = asyncio.Event()
    model.then(holds(asked))
    first = await runner(RUN)
    await enqueue(store, "a")
    await asked.wait()
    first.kill()
    await first.wait()
    await runner(RUN)
    assert await store.settled("a", timeout=60)
    (rollout,) = await store.rollouts(RUN)
    assert (rollout.state, rollout.attempts) == (RolloutState.SUCCEEDED, 2)


async def test_what_the_user_can_mend_is_one_sentence(
    store: Any, model: Any, config: RunConfig, runner: Start
) -> None:
    agent = msgspec.structs.replace(config.agent, path="main_agent.py:agnt")
    await open_run(store, model, msgspec.structs.replace(config, agent=agent))
    process = await runner(RUN, stderr=asyncio.subprocess.PIPE)
    _, text = await process.communicate()
    assert process.returncode == 2
    assert re.fullmatch(r"agentrl: error: agent\.path = .*did you mean 'agent'\?\n", text.decode())


async def test_an_environment_is_not_played_as_an_agent(store: Any) -> None:
    path = "environment:agent:gymnasium:FrozenLake-v1"
    config = RunConfig(agent=AgentConfig(path=path))
    with pytest.raises(ConfigError, match="this runner plays no environments"):
        async with attempt_runner(store, "run", config, Path(), "r", None, ""):
            pass


async def test_a_thread_runs_an_agent_of_this_process(
    store: Any, model: Any, config: RunConfig
) -> None:
    before = dict(os.environ)

    def build() -> Any:
        url = os.environ["OPENAI_BASE_URL"]

        async def agent(text: str) -> str:
            body = {"messages": [{"role": "user", "content": text}]}
            async with httpx.AsyncClient() as client:
                answer = await client.post(f"{url}/chat/completions", json=body)
            return str(answer.json()["choices"][0]["message"]["content"])

        return agent

    runner = RunnerThread(store.url, RUN, agent=build, verifier=lambda task, result: 0.5)
    runner.start()
    await open_run(store, model, config)
    await enqueue(store, "a")
    assert await store.settled("a", timeout=60)
    await asyncio.to_thread(runner.stop)
    runner.done.result(timeout=0)
    (rollout,) = await store.rollouts(RUN)
    assert (rollout.result, rollout.reward()) == ("echo a", 0.5)
    assert dict(os.environ) == before


async def test_a_thread_says_what_ended_it(store: Any, model: Any, config: RunConfig) -> None:
    def build() -> None:
        raise OSError("no key")

    runner = RunnerThread(store.url, RUN, agent=build, verifier=lambda task, result: 0.5)
    runner.start()
    await open_run(store, model, config)
    error = await asyncio.to_thread(runner.done.exception, 60)
    assert "raised OSError: no key" in str(error)
    runner.stop()


@pytest.mark.parametrize("proxy", [None, "http://proxy:1"])
def test_the_environment_is_set_and_restored(
    monkeypatch: pytest.MonkeyPatch, proxy: str | None
) -> None:
    for name in ("HTTP_PROXY", "NO_PROXY", "no_proxy", "OPENAI_BASE_URL"):
        monkeypatch.delenv(name, raising=False)
    if proxy:
        monkeypatch.setenv("HTTP_PROXY", proxy)
    monkeypatch.setenv("OPENAI_API_KEY", "the user's own")
    before = dict(os.environ)
    with environment("http://127.0.0.1:1/v1"):
        assert os.environ["OPENAI_BASE_URL"] == os.environ["OPENAI_API_BASE"]
        assert os.environ["OPENAI_API_KEY"] == os.environ["ANTHROPIC_API_KEY"] == "agentrl"
        assert os.environ["ANTHROPIC_BASE_URL"] == "http://127.0.0.1:1"  # its clients add /v1
        assert os.environ["GOOGLE_GEMINI_BASE_URL"] == "http://127.0.0.1:1"
        assert os.environ["GEMINI_API_BASE"] == "http://127.0.0.1:1/v1"  # litellm adds /models
        assert ("127.0.0.1" in os.environ.get("NO_PROXY", "")) is bool(proxy)
    assert dict(os.environ) == before


@pytest.mark.parametrize("name", ["GEMINI_API_KEY", "GOOGLE_API_KEY"])
def test_a_key_of_googles_that_is_kept_leads_to_google(
    monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    addresses = {"GOOGLE_GEMINI_BASE_URL", "GEMINI_API_BASE"}
    for each in (*addresses, "GEMINI_API_KEY", "GOOGLE_API_KEY"):
        monkeypatch.delenv(each, raising=False)
    monkeypatch.setenv(name, "the user's own")
    before = dict(os.environ)
    with environment("http://127.0.0.1:1/v1", [name]):
        assert os.environ[name] == "the user's own"
        assert addresses.isdisjoint(os.environ)
    with environment("http://127.0.0.1:1/v1"):
        assert os.environ[name] == os.environ["GEMINI_API_KEY"] == "agentrl"
        assert os.environ["GOOGLE_GEMINI_BASE_URL"] == "http://127.0.0.1:1"
    assert dict(os.environ) == before
