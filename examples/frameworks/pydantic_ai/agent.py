"""Two agents of Pydantic AI: a solver with a tool, and a critic that streams. The names of their
models are the roles."""

from pydantic_ai import Agent
from pydantic_ai.models.openai import OpenAIChatModel


def add(a: int, b: int) -> int:
    """Add two numbers."""
    return a + b


solver = Agent(
    OpenAIChatModel("solver"),
    instructions="Solve it with the tool. Reply with the number.",
    tools=[add],
)
critic = Agent(OpenAIChatModel("critic"), instructions="Check the answer: right or wrong?")


async def agent(question: str) -> str:
    answer = (await solver.run(question)).output
    async with critic.run_stream(f"{question} {answer}") as verdict:
        await verdict.get_output()
    return answer
