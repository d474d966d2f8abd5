"""Agents of other frameworks, unmodified: their names are roles, their default clients get answers.

Those that are not installed are skipped; what agentrl reads of them is tested in any case, on spans
of the same shape."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from typing import Any

import pytest
from opentelemetry import trace

from agentrl.runners import frameworks, journal

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
    async with pytest.importorskip("openai").AsyncOpenAI() as client:
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


# -- Microsoft's Agent Framework -------------------------------------------------------------------


@pytest.mark.parametrize("stream", [False, True])
async def test_agents_of_agent_framework_with_its_default_client(bench: Any, stream: bool) -> None:
    framework = pytest.importorskip("agent_framework")
    from agent_framework.openai import OpenAIChatClient

    async def ask(name: str, text: str) -> str:
        agent = framework.Agent(OpenAIChatClient(model="m"), "be brief", name=name)
        if stream:
            return "".join([str(part) async for part in agent.run(text, stream=True)])
        return str(await agent.run(text))

    async def agent(text: str) -> str:
        return await ask("critic", await ask("solver", text))

    calls = await calls_of(bench, agent)
    assert [call.role for call in calls] == ["solver", "critic"]
    assert calls[1].answer["content"] == "echo echo x"


# -- CrewAI ----------------------------------------------------------------------------------------


async def test_a_crew(bench: Any) -> None:
    crewai = pytest.importorskip("crewai")

    def agent(text: str) -> str:
        model = crewai.LLM(model="openai/gpt-4o-mini")
        made = {
            role: crewai.Agent(role=role, goal="g", backstory="b", llm=model) for role in KNOWN
        }
        tasks = [
            crewai.Task(description=text, expected_output="o", agent=made[role])
            for role in ("solver", "critic")
        ]
        return str(crewai.Crew(agents=[*made.values()], tasks=tasks).kickoff())

    assert await roles_of(bench, agent) == ["solver", "critic"]
