"""Unmodified LangChain agents: one object, many rollouts, every call in its own attempt."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest

from agentrl.types import RolloutState


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
        models.append(ChatOpenAI(model="gpt-4o-mini", **settings))
        return create_agent(models[-1], [repeat])

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
