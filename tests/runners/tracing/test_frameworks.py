"""Agents of other frameworks, unmodified: their names are roles, their default clients get answers.

Those that are not installed are skipped; what agentrl reads of them is tested in any case, on spans
of the same shape."""

from __future__ import annotations

import asyncio
import json
import os
import sys
from collections.abc import AsyncIterator
from contextvars import ContextVar
from types import SimpleNamespace
from typing import Any

import httpx
import openai
import pytest
from opentelemetry import trace

from agentrl.runners.tracing import attempt_log
from tests.runners.conftest import echo

KNOWN = {"solver", "critic"}


@pytest.fixture
def bench(bench: Any) -> Any:
    """As in conftest, with a run file that names roles."""
    bench.gateway.attempts.roles = frozenset(KNOWN)
    return bench


async def calls_of(bench: Any, agent: Any) -> list[Any]:
    (rollout,) = await bench.run(agent, {"input": "x"})
    assert rollout.failure is None, rollout.failure
    return list((await bench.store.trace(rollout.id)).transitions)


async def roles_of(bench: Any, agent: Any) -> list[str]:
    return [call.role for call in await calls_of(bench, agent)]


async def ask(text: str) -> None:
    url = os.environ["OPENAI_BASE_URL"] + "/chat/completions"
    body = {"model": "m", "messages": [{"role": "user", "content": text}]}
    async with httpx.AsyncClient() as client:
        (await client.post(url, json=body)).raise_for_status()


def hands_over(tool: str) -> Any:
    """A model that calls this tool where it has it, and else says something."""

    def answer(body: Any) -> dict[str, Any]:
        names = [made["function"]["name"] for made in body.get("tools") or ()]
        said = body["messages"][-1]["role"] == "tool"
        if tool not in names or said:
            return {"role": "assistant", "content": "TERMINATE"}
        function = {"name": tool, "arguments": "{}"}
        call = {"id": "call-1", "type": "function", "function": function}
        return {"role": "assistant", "content": None, "tool_calls": [call]}

    return answer


# -- OpenAI's Agents SDK ---------------------------------------------------------------------------


@pytest.fixture
async def sdk(bench: Any) -> AsyncIterator[Any]:
    """With a client of this test's event loop: the package keeps its own for ever."""
    agents = pytest.importorskip("agents")
    async with openai.AsyncOpenAI() as client:
        agents.set_default_openai_client(client, use_for_tracing=False)
        yield agents


@pytest.mark.parametrize("stream", [False, True])
async def test_handoffs_of_openai_agents(bench: Any, sdk: Any, stream: bool) -> None:
    critic = sdk.Agent(name="critic", instructions="criticise")
    solver = sdk.Agent(name="solver", instructions="solve", handoffs=[critic])

    async def agent(text: str) -> str:
        if not stream:
            return str((await sdk.Runner.run(solver, text)).final_output)
        run = sdk.Runner.run_streamed(solver, text)
        async for _ in run.stream_events():
            pass
        return str(run.final_output)

    bench.model.answer = hands_over("transfer_to_critic")
    calls = await calls_of(bench, agent)
    assert [call.role for call in calls] == ["solver", "critic"]
    assert all(call.exact for call in calls)


async def test_agents_as_tools_of_openai_agents(bench: Any, sdk: Any) -> None:
    inner = sdk.Agent(name="critic", instructions="criticise")
    outer = sdk.Agent(name="solver", tools=[inner.as_tool("ask", "Ask the critic")])

    def answer(body: Any) -> dict[str, Any]:
        if not body.get("tools") or body["messages"][-1]["role"] == "tool":
            return {"role": "assistant", "content": "done"}
        function = {"name": "ask", "arguments": json.dumps({"input": "y"})}
        call = {"id": "call-1", "type": "function", "function": function}
        return {"role": "assistant", "content": None, "tool_calls": [call]}

    async def agent(text: str) -> str:
        return str((await sdk.Runner.run(outer, text)).final_output)

    bench.model.answer = answer
    assert await roles_of(bench, agent) == ["solver", "critic", "solver"]
    bench.gateway.attempts.roles = frozenset({"solver"})  # then the one around it speaks
    assert await roles_of(bench, agent) == ["solver"] * 3
    bench.gateway.attempts.roles = frozenset()
    assert await roles_of(bench, agent) == ["agent"] * 3


# -- AutoGen ---------------------------------------------------------------------------------------


async def test_a_team_of_autogen(bench: Any) -> None:
    agents = pytest.importorskip("autogen_agentchat.agents")
    from autogen_agentchat.conditions import TextMentionTermination
    from autogen_agentchat.teams import Swarm
    from autogen_ext.models.openai import OpenAIChatCompletionClient

    async def agent(text: str) -> str:
        model = OpenAIChatCompletionClient(model="gpt-4o-mini")
        solver = agents.AssistantAgent("solver", model_client=model, handoffs=["critic"])
        critic = agents.AssistantAgent("critic", model_client=model)
        team = Swarm([solver, critic], termination_condition=TextMentionTermination("TERMINATE"))
        result = await team.run(task=text)
        await model.close()
        return str(result.messages[-1].content)

    bench.model.answer = hands_over("transfer_to_critic")
    assert await roles_of(bench, agent) == ["solver", "critic"]


async def test_spans_of_the_same_shape_as_those_of_autogen_and_agent_framework(bench: Any) -> None:
    async def agent(text: str) -> None:
        tracer = trace.get_tracer("somebody")
        await ask(text)
        with tracer.start_as_current_span("invoke_agent solver") as span:
            with tracer.start_as_current_span("chat gpt"):
                span.set_attribute(attempt_log.AGENT_NAME, "solver")  # after it began
                await ask(text)
            inner = {attempt_log.AGENT_NAME: "critic"}
            with tracer.start_as_current_span("invoke_agent critic", attributes=inner):
                await asyncio.create_task(ask(text))
            older = {"gen_ai.workflow.name": "critic"}
            with tracer.start_as_current_span("invoke_workflow critic", attributes=older):
                await ask(text)
            with tracer.start_as_current_span("agent run", attributes={"agent_name": "critic"}):
                await ask(text)
            unknown = {attempt_log.AGENT_NAME: "clerk"}
            with tracer.start_as_current_span("invoke_agent clerk", attributes=unknown):
                await asyncio.to_thread(asyncio.run, ask(text))
        await ask(text)

    expected = ["agent", "solver", "critic", "critic", "critic", "solver", "agent"]
    assert await roles_of(bench, agent) == expected


# -- Microsoft's Agent Framework -------------------------------------------------------------------


@pytest.mark.parametrize("stream", [False, True])
async def test_agents_of_agent_framework_with_its_default_client(bench: Any, stream: bool) -> None:
    framework = pytest.importorskip("agent_framework")
    from agent_framework.openai import OpenAIChatClient

    def look(text: str) -> str:
        """Look something up."""
        return f"found {text}"

    async def ask(client: Any, name: str, text: str) -> str:
        agent = framework.Agent(client, "be brief", name=name, tools=[look])
        if stream:
            return str(await agent.run(text, stream=True).get_final_response())
        return str(await agent.run(text))

    async def agent(text: str) -> str:
        async with openai.AsyncOpenAI() as http:
            client = OpenAIChatClient(model="m", async_client=http)
            return await ask(client, "critic", await ask(client, "solver", text))

    def answer(body: Any) -> dict[str, Any]:
        return echo(body) | {"reasoning_content": "hm"}

    bench.model.answer = answer
    calls = await calls_of(bench, agent)
    assert [call.role for call in calls] == ["solver", "solver", "critic", "critic"]
    assert calls[3].answer["content"] == "echo found echo found x"
    (turn,) = [said for said in calls[1].messages if said["role"] == "assistant"]
    assert turn["reasoning_content"] == "hm"
    assert all(call.exact for call in calls)


# -- CrewAI ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("form", ["kickoff", "akickoff", "alone"])
async def test_a_crew(bench: Any, form: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CREWAI_DISABLE_TELEMETRY", "true")  # it would be sent to its makers
    crewai = pytest.importorskip("crewai")

    def member(role: str) -> Any:
        model = crewai.LLM(model="openai/gpt-4o-mini")
        return crewai.Agent(role=role, goal="g", backstory="b", llm=model)

    async def agent(text: str) -> str:
        made = [member("solver"), member("critic")]
        if form == "alone":
            return str([await asyncio.to_thread(one.kickoff, text) for one in made])
        tasks = [crewai.Task(description=text, expected_output="o", agent=one) for one in made]
        crew = crewai.Crew(agents=made, tasks=tasks)
        if form == "akickoff":
            return str(await crew.akickoff())
        return str(await asyncio.to_thread(crew.kickoff))

    assert await roles_of(bench, agent) == ["solver", "critic"]


async def test_events_of_the_same_shape_as_those_of_crewai(
    bench: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    stack: ContextVar[Any] = ContextVar("stack", default=())
    one = SimpleNamespace(event=SimpleNamespace(agent=SimpleNamespace(role="solver\n")))
    two = SimpleNamespace(event=SimpleNamespace(agent_info={"role": "critic"}))
    state = SimpleNamespace(event_record={"1": one, "2": two})
    bus = SimpleNamespace(runtime_state=state)
    context = SimpleNamespace(_event_id_stack=stack)
    monkeypatch.setitem(sys.modules, "crewai.events.event_context", context)
    monkeypatch.setitem(
        sys.modules, "crewai.events.event_bus", SimpleNamespace(crewai_event_bus=bus)
    )

    async def agent(text: str) -> None:
        await ask(text)
        stack.set((("0", "crew_kickoff_started"), ("1", "agent_execution_started")))
        await ask(text)
        stack.set((*stack.get(), ("2", "lite_agent_execution_started"), ("3", "llm_call_started")))
        await ask(text)
        stack.set((("4", "agent_execution_started"),))  # begun where nobody keeps a record
        await ask(text)
        bus.runtime_state = None
        await ask(text)

    assert await roles_of(bench, agent) == ["agent", "solver", "critic", "agent", "agent"]
