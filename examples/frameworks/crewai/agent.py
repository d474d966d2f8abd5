"""A crew of CrewAI: a solver with a tool, and a critic that checks its result."""

import asyncio

from crewai import LLM, Agent, Crew, Task
from crewai.tools import tool


@tool("add")
def add(a: int, b: int) -> int:
    """Add two numbers."""
    return a + b


def crew(question: str) -> str:
    model = LLM(model="openai/gpt-4o-mini")  # a name with known features
    solver = Agent(role="solver", goal="solve sums", backstory="", llm=model, tools=[add])
    critic = Agent(role="critic", goal="check sums", backstory="", llm=model)
    check = f"Check the answer: {question}"
    tasks = [
        Task(description=question, expected_output="the number", agent=solver),
        Task(description=check, expected_output="the number", agent=critic),
    ]
    return str(Crew(agents=[solver, critic], tasks=tasks).kickoff())


async def agent(question: str) -> str:
    return await asyncio.to_thread(crew, question)
