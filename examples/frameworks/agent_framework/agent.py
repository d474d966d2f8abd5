"""Two agents of Microsoft's Agent Framework: a solver with a tool, and a critic that streams."""

from agent_framework import Agent
from agent_framework.openai import OpenAIChatCompletionClient


def add(a: int, b: int) -> int:
    """Add two numbers."""
    return a + b


async def agent(question: str) -> str:
    client = OpenAIChatCompletionClient(model="policy")
    solver = Agent(
        client, "Solve it with the tool. Reply with the number.", name="solver", tools=[add]
    )
    critic = Agent(client, "Check the answer: right or wrong?", name="critic")
    answer = str(await solver.run(question))
    await critic.run(f"{question} {answer}", stream=True).get_final_response()
    return answer
