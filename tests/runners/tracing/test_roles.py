"""Whose role a call has: by path, baggage, node, agent name or model name, in this order."""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import AsyncIterator, Collection
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any
from urllib.parse import quote

import httpx
import httpx2
import pytest
from opentelemetry import baggage

import agentrl
from agentrl.core.types import Attempt, NewRollout
from agentrl.runners.gateway.attribution import AttemptRegistry
from agentrl.runners.tracing import attempt_log

KNOWN = {"writer", "critic", "team", "researcher"}
ROLLOUT = NewRollout(id="r", run="test", group="g", index=0, task={})
ATTEMPT = Attempt(id="a" * 32, rollout=ROLLOUT, fence=1, lease_until=0.0)


@pytest.fixture
def bench(bench: Any) -> Any:
    """As in conftest, with a run file that names roles."""
    bench.gateway.attempts.roles = frozenset(KNOWN)
    return bench


@pytest.fixture
async def chat() -> AsyncIterator[Any]:
    from langchain_openai import ChatOpenAI

    # Clients of its own: LangChain shares its default ones between models of equal addresses.
    with httpx2.Client() as client:
        async with httpx2.AsyncClient() as other:
            yield ChatOpenAI(model="gpt", http_client=client, http_async_client=other)


def ask(text: str, model: str = "m") -> None:
    url = os.environ["OPENAI_BASE_URL"] + "/chat/completions"
    body = {"model": model, "messages": [{"role": "user", "content": text}]}
    httpx.post(url, json=body, timeout=30).raise_for_status()


async def roles_of(bench: Any, agent: Any, value: Any = "x") -> list[str]:
    (rollout,) = await bench.run(agent, {"input": value})
    assert rollout.failure is None, rollout.failure
    return [call.role for call in (await bench.store.trace(rollout.id)).transitions]


def role_of(model: str, known: Collection[str] = KNOWN, **given: str) -> str:
    """The role of a call that states what is given: a role in its path or baggage, or names."""
    said = {
        attempt_log.ROLE: given.get("said", ""),
        attempt_log.NAMES: quote(given.get("names", "")),
    }
    items = ",".join(f"{key}={value}" for key, value in said.items() if value)
    headers = {"authorization": f"Bearer {ATTEMPT.id}", "baggage": items}
    attempts = AttemptRegistry(roles=known)
    attempts.register(ATTEMPT)
    path = {"role": given["path"]} if "path" in given else {}
    return attempts.caller(headers, path).role_of(model)


def test_the_order_of_the_rule() -> None:
    names = "model,team,critic"
    assert role_of("critic", path="a", said="b", names=names) == "a"
    assert role_of("critic", said="b", names=names) == "b"
    assert role_of("critic", names=names) == "team"
    assert role_of("gpt", (), names=names) == "agent"
    assert role_of("critic", said="b") == "b"
    assert role_of("critic") == "critic"
    assert role_of("gpt") == "agent"


def test_names_survive_the_header() -> None:
    odd = ["a,b", "c=d;e", "ü %+"]
    joined = ",".join(quote(name, safe="") for name in odd)
    headers = {"authorization": f"Bearer {ATTEMPT.id}"}
    for name in odd:
        attempts = AttemptRegistry(roles=[name])
        attempts.register(ATTEMPT)
        item = f"x=1,{attempt_log.NAMES}={quote(joined, safe='')}"
        assert attempts.caller(headers | {"baggage": item}, {}).role == name


async def test_nodes_and_agents_that_the_run_file_names(bench: Any, chat: Any) -> None:
    from langchain.agents import create_agent
    from langgraph.graph import START, MessagesState, StateGraph

    def write(state: MessagesState) -> Any:
        return {"messages": [chat.invoke(state["messages"])]}

    async def critic(state: MessagesState) -> Any:
        return {"messages": [await chat.ainvoke(state["messages"])]}

    async def other(state: MessagesState) -> Any:
        return {"messages": [await chat.ainvoke(state["messages"])]}

    graph = StateGraph(MessagesState)
    graph.add_node("writer", write)
    graph.add_node("critic", critic)
    graph.add_node("other", other)
    graph.add_node("team", create_agent(chat, [], name="researcher"))
    graph.add_node("inner", create_agent(chat, [], name="researcher"))
    graph.add_edge(START, "writer")
    for one, next_one in [
        ("writer", "critic"),
        ("critic", "other"),
        ("other", "team"),
        ("team", "inner"),
    ]:
        graph.add_edge(one, next_one)
    found = await roles_of(bench, graph.compile())
    assert found == ["writer", "critic", "agent", "team", "researcher"]


@pytest.mark.parametrize("known", [{"main"}, {"main", "SummarizationMiddleware.before_model"}])
async def test_calls_of_middleware_with_metadata_of_their_own(
    bench: Any, chat: Any, known: set[str]
) -> None:
    """Metadata of a call replaces that of its step in the config, not in the callbacks."""
    from langchain.agents import create_agent
    from langchain.agents.middleware import SummarizationMiddleware

    bench.gateway.attempts.roles = frozenset(known)
    limits: Any = {"trigger": ("messages", 3), "keep": ("messages", 1)}
    middle = SummarizationMiddleware(model=chat, **limits)
    agent = create_agent(chat, [], name="main", middleware=[middle])
    said = {"messages": [("user", "a"), ("ai", "b"), ("user", "c")]}

    def sync(text: str) -> str:
        return str(agent.invoke(said)["messages"][-1].content)

    async def later(text: str) -> str:
        return str((await agent.ainvoke(said))["messages"][-1].content)

    first = next((name for name in known if name != "main"), "main")
    assert await roles_of(bench, sync) == [first, "main"]
    assert await roles_of(bench, later) == [first, "main"]


async def test_a_runnable_with_metadata_of_its_own_stays_in_its_node(bench: Any, chat: Any) -> None:
    from langchain_core.runnables import RunnableLambda
    from langgraph.graph import START, MessagesState, StateGraph

    def ask(text: str) -> Any:
        return chat.invoke(text)

    def write(state: MessagesState) -> Any:
        chain = RunnableLambda(ask).with_config(metadata={"own": "value"})
        return {"messages": [chain.invoke("x")]}

    graph = StateGraph(MessagesState)
    graph.add_node("writer", write)
    graph.add_edge(START, "writer")
    assert await roles_of(bench, graph.compile()) == ["writer"]


def test_the_agent_of_a_crews_task_makes_the_calls_after_its_work(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """CrewAI asks a model to convert an answer in prose when the agent has ended already."""
    agent = SimpleNamespace(role=" main ")
    event = SimpleNamespace(task=SimpleNamespace(agent=agent))
    record = {"1": SimpleNamespace(event=event), "0": SimpleNamespace(event=SimpleNamespace())}
    stack = SimpleNamespace(get=lambda: (("0", "crew_kickoff_started"), ("1", "task_started")))
    bus = SimpleNamespace(runtime_state=SimpleNamespace(event_record=record))
    context = SimpleNamespace(_event_id_stack=stack)
    monkeypatch.setitem(sys.modules, "crewai.events.event_context", context)
    monkeypatch.setitem(
        sys.modules, "crewai.events.event_bus", SimpleNamespace(crewai_event_bus=bus)
    )
    assert list(attempt_log._crewai()) == ["main"]


async def test_a_single_agent_stays_the_agent(bench: Any, chat: Any) -> None:
    from langchain.agents import create_agent

    assert await roles_of(bench, create_agent(chat, [])) == ["agent"]
    assert await roles_of(bench, create_agent(chat, [], name="researcher")) == ["researcher"]


async def test_model_names_are_the_last_resort(bench: Any) -> None:
    def agent(text: str) -> None:
        ask(text, "critic")
        ask(text, "gpt")
        with agentrl.role("writer"):
            ask(text, "critic")

    assert await roles_of(bench, agent) == ["critic", "agent", "writer"]


async def test_role_reaches_threads_and_tasks(bench: Any) -> None:
    async def agent(text: str) -> None:
        with agentrl.role("left"), ThreadPoolExecutor(1) as pool:
            await asyncio.wrap_future(pool.submit(ask, text))
            await asyncio.create_task(asyncio.to_thread(ask, text))
            with agentrl.role("inner"):
                await asyncio.to_thread(ask, text)
            await asyncio.to_thread(ask, text)
        await asyncio.to_thread(ask, text)

    assert await roles_of(bench, agent) == ["left", "left", "inner", "left", "agent"]


def test_role_outside_of_a_rollout_does_nothing() -> None:
    with agentrl.role("critic"):
        assert baggage.get_baggage(attempt_log.ROLE) is None
    with pytest.raises(ValueError, match="needs a name"), agentrl.role(""):
        pass
