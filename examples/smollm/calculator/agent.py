"""A LangChain agent with a calculator.

There is no training code here. Point OPENAI_BASE_URL at any OpenAI-compatible server and call
`agent.invoke({"messages": [("user", "What is 12 times 34?")]})`.
"""

from langchain.agents import create_agent
from langchain.tools import tool
from langchain_openai import ChatOpenAI


@tool
def multiply(a: int, b: int) -> str:
    """Multiply two numbers."""
    return str(a * b)


agent = create_agent(ChatOpenAI(model="policy"), [multiply])
agent = agent.with_config(recursion_limit=8)  # four model calls; two are enough
