"""Rewards that an agent gives itself, and those that a verifier gives to parts of a rollout."""

from __future__ import annotations

import asyncio
import os
import secrets
from typing import Any

import aiohttp
import httpx
import pytest
import requests
from aiohttp import web
from opentelemetry import propagate
from opentelemetry import trace as otel

import agentrl
from agentrl import Reward, Scope, Trace
from agentrl.core.types import ErrorKind, RolloutState, Span
from agentrl.runners.scoring import VerifierError, resolve_targets
from agentrl.runners.tracing import core as tracing
from tests import factories

TASK = {"input": "x"}


def url() -> str:
    return os.environ["OPENAI_BASE_URL"] + "/chat/completions"


def said(text: str) -> dict[str, Any]:
    return {"model": "m", "messages": [{"role": "user", "content": text}]}


async def ask(client: httpx.AsyncClient, text: str) -> None:
    (await client.post(url(), json=said(text))).raise_for_status()


async def given(bench: Any, agent: Any, **settings: Any) -> dict[str, list[tuple[float, str]]]:
    """Values and what they are about, by name: the text said in a call, or the target."""
    (rollout,) = await bench.run(agent, TASK, **settings)
    assert rollout.failure is None, rollout.failure
    trace = await bench.store.trace(rollout.id)
    texts = {call.id: call.messages[-1]["content"] for call in trace.transitions}
    found: dict[str, list[tuple[float, str]]] = {}
    for row in rollout.rewards:
        about = texts.get(row.target or "", row.target or "")
        found.setdefault(row.name, []).append((row.value, about))
    return found


async def test_a_reward_is_about_the_latest_call_of_its_own_branch(bench: Any) -> None:
    async def branch(client: httpx.AsyncClient, name: str, other: asyncio.Event) -> None:
        await ask(client, name)
        other.set()
        await asyncio.sleep(0)
        agentrl.reward(len(name), name)
        await asyncio.wait_for(ask(client, f"{name}, inner"), 20)  # in a task of its own
        agentrl.reward(0.5, name)

    async def agent(text: str) -> None:
        event = asyncio.Event()
        async with httpx.AsyncClient() as client:
            await ask(client, "first")
            agentrl.reward(1.0)
            await asyncio.gather(*(branch(client, name, event) for name in ("a", "bb", "ccc")))
            agentrl.reward(True, "whole", scope="rollout")
            agentrl.reward(3.0, "role", scope="role", target="agent")
            with agentrl.role("critic"):
                await ask(client, "critique")
            agentrl.reward(4.0, "role", scope=Scope.ROLE)

    assert await given(bench, agent) == {
        "process": [(1.0, "first")],
        "a": [(1.0, "a"), (0.5, "a, inner")],
        "bb": [(2.0, "bb"), (0.5, "bb, inner")],
        "ccc": [(3.0, "ccc"), (0.5, "ccc, inner")],
        "whole": [(1.0, "")],
        "role": [(3.0, "agent"), (4.0, "critic")],
        "outcome": [(1.0, "")],
    }


async def test_nodes_that_run_side_by_side_reward_their_own_calls(bench: Any) -> None:
    graphs = pytest.importorskip("langgraph.graph")
    both = asyncio.Barrier(2)

    def node(name: str) -> Any:
        async def work(state: Any) -> Any:
            async with httpx.AsyncClient() as client:
                await asyncio.create_task(ask(client, name))
                await both.wait()
                agentrl.reward(1.0, name)
            return {"messages": []}

        return work

    def judge(state: Any) -> Any:
        agentrl.reward(0.5, "judge")  # has no call of its own: the latest of the graph
        return {"messages": []}

    graph = graphs.StateGraph(graphs.MessagesState)
    for name in ("left", "right"):
        graph.add_node(name, node(name))
        graph.add_edge(graphs.START, name)
        graph.add_edge(name, "judge")
    graph.add_node("judge", judge)
    compiled = graph.compile()
    found = await given(bench, lambda text: compiled.ainvoke({"messages": []}))
    assert found["left"] == [(1.0, "left")]
    assert found["right"] == [(1.0, "right")]
    assert found["judge"][0][1] in ("left", "right")


async def test_rewards_of_a_thread(bench: Any) -> None:
    def agent(text: str) -> None:
        for name in ("one", "two"):
            httpx.post(url(), json=said(name), timeout=30).raise_for_status()
            agentrl.reward(1, name)

    found = await given(bench, agent)
    assert (found["one"], found["two"]) == ([(1.0, "one")], [(1.0, "two")])


async def with_openai_on_aiohttp(text: str) -> None:
    openai = pytest.importorskip("openai")
    messages = [{"role": "user", "content": text}]
    async with openai.AsyncOpenAI(http_client=openai.DefaultAioHttpClient()) as client:
        stream = await client.chat.completions.create(model="m", messages=messages, stream=True)
        assert [event async for event in stream]


async def with_anthropic_on_aiohttp(text: str) -> None:
    anthropic = pytest.importorskip("anthropic")
    messages = [{"role": "user", "content": text}]
    async with anthropic.AsyncAnthropic(http_client=anthropic.DefaultAioHttpClient()) as client:
        await client.messages.create(model="m", max_tokens=9, messages=messages)


class OnRequests(httpx.BaseTransport):
    """Sends with requests, which knows nothing of the headers that httpx has."""

    def handle_request(self, request: httpx.Request) -> httpx.Response:
        body, kind = request.read(), {"content-type": request.headers["content-type"]}
        answer = requests.post(str(request.url), data=body, headers=kind, timeout=30)
        return httpx.Response(answer.status_code, content=answer.content)


def with_httpx_on_requests(text: str) -> None:
    with httpx.Client(transport=OnRequests()) as client:
        client.post(url(), json=said(text)).raise_for_status()


def with_a_request_that_is_sent_twice(text: str) -> None:
    with httpx.Client() as client:
        request = client.build_request("POST", url(), json=said(text))
        client.send(request).raise_for_status()
        client.post(url(), json=said("other")).raise_for_status()
        client.send(request).raise_for_status()


def with_a_traceparent_of_its_own(text: str) -> None:
    headers: dict[str, str] = {}
    with otel.get_tracer("mine").start_as_current_span("call"):
        propagate.inject(headers)
        httpx.post(url(), json=said(text), headers=headers, timeout=30).raise_for_status()
        httpx.post(url(), json=said("other"), timeout=30).raise_for_status()
    httpx.post(url(), json=said(text), headers=headers, timeout=30).raise_for_status()


async def with_a_tool_after_it(text: str) -> None:
    async with httpx.AsyncClient() as client, aiohttp.ClientSession() as session:
        await asyncio.create_task(ask(client, text))
        with pytest.raises(httpx.ConnectError):
            await client.get("http://127.0.0.1:1/search")
        await session.head(url().removesuffix("/v1/chat/completions"))


CLIENTS = [
    with_openai_on_aiohttp, with_anthropic_on_aiohttp, with_httpx_on_requests,
    with_a_request_that_is_sent_twice, with_a_traceparent_of_its_own, with_a_tool_after_it,
]  # fmt: skip


async def test_a_reward_finds_the_latest_model_call_of_any_client(bench: Any) -> None:
    for call in CLIENTS:

        async def agent(text: str, call: Any = call) -> None:
            for name in ("one", "two"):
                is_async = asyncio.iscoroutinefunction(call)
                await (call(name) if is_async else asyncio.to_thread(call, name))
                agentrl.reward(0.5, name)

        found = await given(bench, agent)
        assert (found["one"], found["two"]) == ([(0.5, "one")], [(0.5, "two")]), call


async def test_a_client_on_top_of_another_makes_one_span(bench: Any) -> None:
    await given(bench, with_openai_on_aiohttp)
    (rollout,) = await bench.store.rollouts("test")
    spans = (await bench.store.trace(rollout.id)).spans
    assert sorted(span.name for span in spans) == ["POST", "attempt"]


async def test_calls_inside_a_request_to_an_app_of_the_same_process(
    bench: Any, caplog: pytest.LogCaptureFixture
) -> None:
    """A reward inside the app is for its own call, one after the request for the app's last."""

    async def app(scope: Any, receive: Any, send: Any) -> None:
        async with httpx.AsyncClient() as client:
            for text in ("first", "second"):
                await ask(client, text)
                agentrl.reward(0.5, text)
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b""})

    async def agent(text: str) -> None:
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app)) as client:
            await client.get("http://app/")
        agentrl.reward(0.25, "after")

    found = await given(bench, agent)
    assert (found["first"], found["second"]) == ([(0.5, "first")], [(0.5, "second")])
    assert found["after"] == [(0.25, "second")]
    assert "dropped" not in caplog.text


async def test_a_reward_for_a_failed_call_is_not_given_to_the_one_before(
    bench: Any, caplog: pytest.LogCaptureFixture
) -> None:
    async def refuse(request: web.Request, body: Any) -> web.Response:
        return web.json_response({"error": {"message": "scripted"}}, status=400)

    async def agent(text: str) -> None:
        async with httpx.AsyncClient() as client:
            await ask(client, "good")
            bench.model.then(refuse)
            answer = await client.post(url(), json=said("bad"))
            assert answer.status_code == 400
            await client.get(url().replace("chat/completions", "models"))
            agentrl.reward(0.5)

    assert "process" not in await given(bench, agent)
    assert "a failed model call is dropped" in caplog.text


def test_outside_of_a_rollout_only_mistakes_are_noticed() -> None:
    agentrl.reward(1.0)
    for wrong in (
        lambda: agentrl.reward(float("nan")),
        lambda: agentrl.reward(float("-inf"), scope="rollout"),
        lambda: agentrl.reward(1.0, scope="token"),
        lambda: agentrl.reward(1.0, scope="rollout", target="x"),
        lambda: agentrl.reward(1.0, target="x"),
        lambda: agentrl.reward("much"),  # type: ignore[arg-type]
        lambda: agentrl.reward("1.0"),  # type: ignore[arg-type]
        lambda: agentrl.reward(bytearray(b"1.0")),  # type: ignore[arg-type]
        lambda: agentrl.reward(None),  # type: ignore[arg-type]
    ):
        with pytest.raises(ValueError, match=r"number, not|reward scope|no target"):
            wrong()


def test_a_reward_before_any_call_is_refused_where_it_is_given() -> None:
    with tracing.install().attempt(secrets.token_hex(16)) as left:
        with pytest.raises(ValueError, match="no model call yet"):
            agentrl.reward(1.0)
        agentrl.reward(2.0, scope="rollout")
    assert left.rewards == [Reward(value=2.0, name="process", source="agent")]


async def test_a_failed_attempt_has_no_rewards(bench: Any) -> None:
    def agent(text: str) -> None:
        agentrl.reward(1.0, scope="rollout")
        raise ValueError("no")

    (rollout,) = await bench.run(agent, TASK)
    assert (rollout.failure.kind, rollout.rewards) == (ErrorKind.AGENT, [])


def test_a_reward_about_a_call_that_was_never_stored_is_dropped(
    caplog: pytest.LogCaptureFixture,
) -> None:
    row = Reward(value=1.0, scope=Scope.TRANSITION, target="call:0123456789abcdef")
    assert resolve_targets([row], None, []) == []
    assert "failed" in caplog.text


async def test_a_verifier_rewards_steps_and_roles(bench: Any) -> None:
    async def agent(text: str) -> None:
        async with httpx.AsyncClient() as client:
            await ask(client, "good")
            with agentrl.role("critic"):
                await ask(client, "bad")

    async def verify(trace: Trace) -> list[Reward]:
        about = [call.messages[-1]["content"] for call in trace.transitions]
        return [
            Reward(value=float(text == "good"), name="step", scope=Scope.TRANSITION, target=call.id)
            for call, text in zip(trace.transitions, about, strict=True)
        ] + [Reward(value=0.25, scope=Scope.ROLE, target="critic"), Reward(value=2)]

    assert await given(bench, agent, verifier=verify) == {
        "step": [(1.0, "good"), (0.0, "bad")],
        "outcome": [(0.25, "critic"), (2.0, "")],
    }


async def test_a_verifier_that_rewards_what_does_not_exist_has_failed(bench: Any) -> None:
    def verify(task: Any) -> Reward:
        return Reward(value=1.0, scope=task["scope"], target="nobody")

    async def agent(text: str) -> None:
        if text == "asks":
            async with httpx.AsyncClient() as client:
                await ask(client, text)

    tasks = [{"input": x, "scope": s} for s in ("transition", "role") for x in ("asks", "silent")]
    rollouts = await bench.run(agent, *tasks, verifier=verify)
    how = 'it has agent. Names of .* write nobody = "policy" below [roles], or roles = ["nobody"]'
    for task, rollout in zip(tasks, rollouts, strict=True):
        said = f"to the {task['scope']} 'nobody', which this attempt does not have"
        assert rollout.failure.kind is ErrorKind.VERIFIER, task
        assert said in rollout.failure.message
        assert rollout.rewards == [], task
        helps = all(part in rollout.failure.message for part in how.split(".*"))
        assert helps == (task == {"input": "asks", "scope": "role"}), task


def test_spans_of_the_users_own_between_call_and_request_are_skipped() -> None:
    """An instrumented client sends the id of a span of its own, a child of the call's."""
    attempt, outer, inner = "ab" * 16, "1" * 16, "2" * 16
    span = Span(id=inner, attempt=attempt, parent=outer, name="x", kind="internal", start=1, end=2)
    made = factories.call(f"{attempt}-0", (), (), attempt=attempt, span=inner)
    rollout = factories.rollout(task=TASK, state=RolloutState.RUNNING, attempt=attempt)
    trace = Trace(rollout=rollout, attempt=attempt, transitions=[made], spans=[])
    row = Reward(value=1.0, scope=Scope.TRANSITION, target=f"call:{outer}")
    assert [found.target for found in resolve_targets([row], trace, [span])] == [made.id]


async def test_a_span_that_the_agent_opens_is_around_its_calls(bench: Any) -> None:
    async def agent(text: str) -> None:
        async with httpx.AsyncClient() as client:
            with otel.get_tracer("mine").start_as_current_span("draft"):
                await ask(client, "draft")
            with otel.get_tracer("mine").start_as_current_span("polish"):
                await ask(client, "polish")
                agentrl.reward(1.0)

    assert (await given(bench, agent))["process"] == [(1.0, "polish")]
    (rollout,) = await bench.store.rollouts("test")
    spans = {span.id: span for span in (await bench.store.trace(rollout.id)).spans}
    posts = [spans[span.parent].name for span in spans.values() if span.name == "POST"]
    assert sorted(posts) == ["draft", "polish"]


def test_settling_names_what_there_is() -> None:
    with pytest.raises(VerifierError, match="it has none, as it made no model call"):
        resolve_targets([Reward(value=1.0, scope=Scope.ROLE, target="critic")], None, [])
