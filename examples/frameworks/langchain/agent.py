"""Two LangChain agents: one solves a sum with a tool and streams, the other checks it."""

from langchain.agents import create_agent
from langchain_openai import ChatOpenAI


def add(a: int, b: int) -> int:
    """Add two numbers."""
    return a + b


solver = create_agent(
    ChatOpenAI(model="policy", streaming=True),
    [add],
    name="solver",
    system_prompt="Solve it with the tool. Reply with the number.",
)
critic = create_agent(
    ChatOpenAI(model="policy"), name="critic", system_prompt="Check the answer: right or wrong?"
)


async def agent(question: str) -> str:
    solved = await solver.ainvoke({"messages": [("user", question)]})
    answer = str(solved["messages"][-1].content)
    await critic.ainvoke({"messages": [("user", f"{question} {answer}")]})
    return answer
