"""A swarm of AutoGen: a solver with a tool hands over to a critic. It streams."""

from autogen_agentchat.agents import AssistantAgent
from autogen_agentchat.conditions import MaxMessageTermination, TextMentionTermination
from autogen_agentchat.teams import Swarm
from autogen_ext.models.openai import OpenAIChatCompletionClient


def add(a: int, b: int) -> str:
    """Add two numbers."""
    return str(a + b)


async def agent(question: str) -> str:
    model = OpenAIChatCompletionClient(model="gpt-4o-mini")  # a name with known features
    solver = AssistantAgent(
        "solver",
        model,
        tools=[add],
        handoffs=["critic"],
        system_message="Solve it with the tool, then hand over.",
        model_client_stream=True,
    )
    critic = AssistantAgent(
        "critic",
        model,
        system_message="Check the answer, say right or wrong, then TERMINATE.",
        model_client_stream=True,
    )
    ending = TextMentionTermination("TERMINATE") | MaxMessageTermination(12)
    result = await Swarm([solver, critic], termination_condition=ending).run(task=question)
    await model.close()
    return str(result.messages[-1].content)
