"""Unmodified LangChain agents: one object, many rollouts, every call in its own attempt."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Callable
from typing import Any

import openai
import pytest

import agentrl
from agentrl.core.types import RolloutState
from agentrl.runners.tracing import attempt_log
from agentrl.runners.tracing import core as tracing
from agentrl.runners.tracing import langchain_steps as steps


@pytest.fixture
async def build(bench: Any) -> AsyncIterator[Callable[..., Any]]:
    """Builds an agent with one tool as a user would; its HTTP clients are closed afterwards."""
    from langchain.agents import create_agent
    from langchain_openai import ChatOpenAI

    models = []

    def repeat(text: str) -> str:
        """Repeat a text."""
        return f"tool {text}"

    def build(**settings: Any) -> Any:
        name = settings.pop("name", None)
        models.append(ChatOpenAI(model="gpt-4o-mini", **settings))
        return create_agent(models[-1], [repeat], name=name)

    yield build
    for model in models:
        await model.root_async_client.close()
        model.root_client.close()


def sync(agent: Any) -> Callable[[str], str]:
    def call(text: str) -> str:
        return str(agent.invoke({"messages": [("user", text)]})["messages"][-1].content)

    return call


@pytest.mark.parametrize("form", ["async", "streaming", "threads"])
async def test_interleaved_rollouts_of_one_agent_are_never_confused(
    bench: Any, build: Any, form: str
) -> None:
    agent = build(streaming=form == "streaming")
    tasks = [{"input": f"token-{i}-"} for i in range(32)]
    rollouts = await bench.run(sync(agent) if form == "threads" else agent, *tasks, concurrency=32)
    for task, rollout in zip(tasks, rollouts, strict=True):
        assert rollout.state is RolloutState.SUCCEEDED, rollout.failure
        assert rollout.result == f"echo tool {task['input']}"
        trace = await bench.store.trace(rollout.id)
        assert [t.index for t in trace.transitions] == [0, 1]
        for t in trace.transitions:
            said = bytes(t.prompt.tolist()).decode()
            assert task["input"] in said
            assert said.count("token-") == said.count(task["input"])
            assert t.exact
            assert len(t.logprobs) == len(t.completion) > 0
            assert t.version == 7
            assert t.span in {span.id for span in trace.spans}


def tree(trace: Any) -> dict[str, tuple[str, str | None]]:
    """Kind and parent's name of each span, by name; of equal names the last."""
    names = {span.id: span.name for span in trace.spans}
    return {span.name: (span.kind, names.get(span.parent)) for span in trace.spans}


async def test_the_frameworks_steps_are_spans_around_the_calls(bench: Any, build: Any) -> None:
    (rollout,) = await bench.run(build(name="clerk"), {"input": "x"})
    trace = await bench.store.trace(rollout.id)
    assert tree(trace) == {
        "attempt": ("agent", None),
        "clerk": ("agent", "attempt"),
        "model": ("chain", "clerk"),
        "POST": ("internal", "model"),
        "tools": ("chain", "clerk"),
        "repeat": ("tool", "tools"),
    }
    assert all(span.ok and span.end >= span.start for span in trace.spans)
    calls = {span.id for span in trace.spans if span.name == "POST"}
    assert {t.span for t in trace.transitions} == calls


async def test_openinference_records_the_rest_on_request(bench: Any, build: Any) -> None:
    instrumentation = pytest.importorskip("openinference.instrumentation.langchain")
    agent = build()
    tracing.install()
    steps.instrument_frameworks()
    try:
        (rollout,) = await bench.run(agent, {"input": "x"})
    finally:
        instrumentation.LangChainInstrumentor().uninstrument()
        steps.set_recorder(None)
    trace = await bench.store.trace(rollout.id)
    kinds = [span.kind for span in trace.spans]
    assert {"agent", "chain", "tool", "llm"} <= set(kinds)
    assert kinds.count("tool") == 1
    found = tree(trace)
    assert found["POST"] == ("internal", "model")
    assert found["ChatOpenAI"] == ("llm", "model")
    (root,) = [span for span in trace.spans if span.parent is None]
    assert root.name == "attempt"


async def test_a_step_that_fails_or_never_ends_is_not_ok(bench: Any) -> None:
    from langchain_core.runnables import RunnableLambda

    async def never(text: str) -> None:
        await asyncio.Event().wait()

    def fails(text: str) -> None:
        raise ValueError("no")

    for chain, name in ((RunnableLambda(fails), "fails"), (RunnableLambda(never), "never")):
        (rollout,) = await bench.run(chain, {"input": "x"}, timeout=0.2)
        spans = {span.name: span for span in (await bench.store.trace(rollout.id)).spans}
        assert (spans[name].kind, spans[name].ok) == ("chain", False)


async def test_role_set_around_a_call_is_recorded(bench: Any, build: Any) -> None:
    agent = build()

    async def critic(text: str) -> Any:
        with tracing.role("critic"):
            return await agent.ainvoke({"messages": [("user", text)]})

    (rollout,) = await bench.run(critic, {"input": "x"})
    trace = await bench.store.trace(rollout.id)
    assert {t.role for t in trace.transitions} == {"critic"}


@pytest.mark.parametrize("form", ["batch", "abatch", "stream"])
async def test_a_reward_in_a_sequence_is_about_the_call_of_its_own_input(
    bench: Any, form: str
) -> None:
    """`batch` asks the model for all inputs before it goes on with the first."""
    from langchain_core.runnables import RunnableLambda
    from langchain_openai import ChatOpenAI

    model = ChatOpenAI(model="gpt-4o-mini", streaming=form == "stream")

    def judge(answer: Any) -> str:
        agentrl.reward(0.5, answer.content)
        return str(answer.content)

    chain = model | RunnableLambda(judge)

    async def agent(text: str) -> list[str]:
        inputs = [f"{text}{index}" for index in range(4)]
        if form == "abatch":
            return await chain.abatch(inputs)
        return await asyncio.to_thread(chain.batch, inputs)

    (rollout,) = await bench.run(agent, {"input": "x"})
    await model.root_async_client.close()
    model.root_client.close()
    calls = (await bench.store.trace(rollout.id)).transitions
    asked = {call.id: call.messages[-1]["content"] for call in calls}
    given = [row for row in rollout.rewards if row.source == "agent"]
    assert len(given) == 4, rollout.failure
    assert {row.name for row in given} == {*rollout.result}
    assert [f"echo {asked[row.target]}" for row in given] == [row.name for row in given]


async def test_a_model_call_that_failed_is_over(
    bench: Any, caplog: pytest.LogCaptureFixture
) -> None:
    """LangChain gives `on_llm_error` the keyword `response`, too. What raises in a callback is only
    logged, and later calls would belong to the step that failed."""
    from langchain_core.runnables import RunnableLambda
    from langchain_openai import ChatOpenAI

    steps_after = list[str | None]()

    def step(text: str) -> str:
        try:
            nowhere = f"{os.environ['OPENAI_BASE_URL']}/nowhere"
            ChatOpenAI(model="m", max_retries=0, base_url=nowhere).invoke(text)
        except openai.NotFoundError as error:
            steps_after.append(attempt_log.model_step.get())
            return type(error).__name__
        pytest.fail("it was answered")

    def agent(text: str) -> str:
        name = RunnableLambda(step).invoke(text)
        ChatOpenAI(model="m").invoke(text)
        return str(name)

    (rollout,) = await bench.run(agent, {"input": "x"})
    assert steps_after == [None], rollout.failure
    assert "Error in" not in caplog.text
