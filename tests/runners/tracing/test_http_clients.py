"""Every HTTP client, in every form, inside concurrent attempts: whose call is it?"""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import aiohttp
import httpx
import httpx2
import pytest
import requests

from agentrl.core.types import RolloutState
from agentrl.runners.tracing import core as tracing

pool = ThreadPoolExecutor(4)  # shared by all attempts, as an agent's module would


def url() -> str:
    return os.environ["OPENAI_BASE_URL"] + "/chat/completions"


def body(text: str) -> dict[str, Any]:
    return {"model": "m", "messages": [{"role": "user", "content": text}]}


def said(answer: dict[str, Any]) -> str:
    return str(answer["choices"][0]["message"]["content"])


def with_requests(text: str) -> str:
    with requests.Session() as session:
        return said(session.post(url(), json=body(text), timeout=30).json())


def with_httpx(text: str) -> str:
    return said(httpx.post(url(), json=body(text), timeout=30).json())


async def with_httpx_async(text: str) -> str:
    async with httpx.AsyncClient() as client:
        return said((await client.post(url(), json=body(text))).json())


def with_httpx2(text: str) -> str:
    return said(httpx2.post(url(), json=body(text), timeout=30).json())


async def with_httpx2_async(text: str) -> str:
    async with httpx2.AsyncClient() as client:
        return said((await client.post(url(), json=body(text))).json())


async def with_aiohttp(text: str) -> str:
    async with aiohttp.ClientSession() as session, session.post(url(), json=body(text)) as answer:
        return said(await answer.json())


def in_a_thread(text: str) -> str:
    answers: list[str] = []
    thread = threading.Thread(target=lambda: answers.append(with_requests(text)))
    thread.start()
    thread.join(30)
    return answers[0]


class Worker(threading.Thread):
    def __init__(self, text: str) -> None:
        super().__init__()
        self.text, self.answer = text, ""

    def run(self) -> None:
        self.answer = with_httpx(self.text)


def in_a_thread_of_its_own_class(text: str) -> str:
    worker = Worker(text)
    worker.start()
    worker.join(30)
    return worker.answer


def in_a_shared_pool(text: str) -> str:
    return pool.submit(with_httpx, text).result(30)


async def in_an_executor(text: str) -> str:
    return await asyncio.get_running_loop().run_in_executor(pool, with_requests, text)


async def in_a_pool_from_a_thread(text: str) -> str:
    return await asyncio.to_thread(in_a_shared_pool, text)


CLIENTS: list[Callable[[str], Any]] = [
    with_requests, with_httpx, with_httpx_async, with_httpx2, with_httpx2_async, with_aiohttp,
    in_a_thread, in_a_thread_of_its_own_class, in_a_shared_pool, in_an_executor,
    in_a_pool_from_a_thread,
]  # fmt: skip


async def test_calls_of_concurrent_attempts_are_attributed(bench: Any) -> None:
    for client in CLIENTS:
        tasks = [{"input": f"token-{i}-"} for i in range(8)]
        rollouts = await bench.run(client, *tasks, concurrency=8)
        for task, rollout in zip(tasks, rollouts, strict=True):
            assert rollout.state is RolloutState.SUCCEEDED, (client, rollout.failure)
            assert rollout.result == f"echo {task['input']}", client
            trace = await bench.store.trace(rollout.id)
            (call,) = trace.transitions
            assert call.messages[-1]["content"] == task["input"], client
            (span,) = [span for span in trace.spans if span.id == call.span]
            assert span.attributes == {"url.full": url(), "http.response.status_code": 200}
            assert span.ok, client


async def test_the_real_sdks_in_every_form(bench: Any) -> None:
    openai = pytest.importorskip("openai")

    async def agent(text: str) -> list[str | None]:
        messages = [{"role": "user", "content": text}]
        with openai.OpenAI() as sync:
            plain = await asyncio.to_thread(
                lambda: sync.chat.completions.create(model="m", messages=messages)
            )
        async with openai.AsyncOpenAI() as client:
            other = await client.chat.completions.create(model="m", messages=messages)
        return [plain.choices[0].message.content, other.choices[0].message.content]

    rollouts = await bench.run(agent, *({"input": f"t{i}"} for i in range(4)), concurrency=4)
    assert [r.result for r in rollouts] == [[f"echo t{i}"] * 2 for i in range(4)]
    for rollout in rollouts:
        trace = await bench.store.trace(rollout.id)
        assert len(trace.transitions) == 2


async def test_a_session_made_before_the_attempt_is_taught_too(bench: Any) -> None:
    async with aiohttp.ClientSession(headers={"x-mine": "1"}) as session:

        async def agent(text: str) -> str:
            async with session.post(url(), json=body(text), headers=[("x-also", "2")]) as answer:
                return said(await answer.json())

        (rollout,) = await bench.run(agent, {"input": "x"})
    assert rollout.result == "echo x"
    assert {"x-mine", "x-also"} <= {name.lower() for name in bench.model.headers[0]}


async def test_a_call_from_outside_of_any_attempt_is_refused(bench: Any) -> None:
    tracing.install()
    for call in (with_requests, with_httpx, with_httpx2):
        with pytest.raises(KeyError, match="choices"):
            await asyncio.to_thread(call, "x")
    answer = await asyncio.to_thread(requests.post, url(), json=body("x"), timeout=30)
    assert answer.status_code == 401
    assert "belongs to no rollout" in answer.json()["error"]["message"]
    assert not bench.model.requests


async def test_a_worker_thread_of_a_shared_pool_belongs_to_nobody(bench: Any) -> None:
    with ThreadPoolExecutor(1) as shared:

        def agent(text: str) -> str:
            return shared.submit(with_httpx, text).result(30)

        (rollout,) = await bench.run(agent, {"input": "x"})
        assert rollout.result == "echo x"
        answer = shared.submit(requests.post, url(), json=body("y"), timeout=30).result(30)
    assert answer.status_code == 401


async def test_what_the_agent_says_itself_is_left_alone(bench: Any) -> None:
    own = {"baggage": "agentrl.role=critic,mine=1"}

    def agent(text: str) -> str:
        return said(requests.post(url(), json=body(text), headers=own, timeout=30).json())

    (rollout,) = await bench.run(agent, {"input": "x"})
    (call,) = (await bench.store.trace(rollout.id)).transitions
    assert call.role == "critic"


async def test_a_failed_request_is_a_failed_span(bench: Any) -> None:
    def agent(text: str) -> str:
        missing = requests.get(url().replace("chat/completions", "nothing?key=1"), timeout=30)
        with pytest.raises(requests.ConnectionError):
            requests.get("http://127.0.0.1:1/", timeout=30)
        return str(missing.status_code)

    (rollout,) = await bench.run(agent, {"input": "x"})
    assert rollout.result == "404"
    calls = [span for span in (await bench.store.trace(rollout.id)).spans if span.name == "GET"]
    assert [span.ok for span in calls] == [False, False]
    assert "key" not in calls[0].attributes["url.full"]
