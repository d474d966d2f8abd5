"""A LangChain agent that answers questions about a sales report by looking at its pages.

There is no training code here. Point OPENAI_BASE_URL at any OpenAI-compatible server whose model
sees images and call `agent.invoke(task["input"])` with a task of tasks.py. `blind` is the same
agent, to whom every page is grey.
"""

from base64 import b64encode

from charts import hidden, page
from langchain.agents import AgentState, create_agent
from langchain.tools import ToolRuntime, tool
from langchain_openai import ChatOpenAI

PROMPT = "Look at the page shops, then at the page of a shop."


class Reader(AgentState):
    report: int  # the report that the tool opens


def shown(png: bytes) -> list[dict[str, str]]:
    return [{"type": "image", "base64": b64encode(png).decode(), "mime_type": "image/png"}]


@tool
def look(name: str, runtime: ToolRuntime) -> str | list[dict[str, str]]:
    """Show a page."""
    try:
        return shown(page(runtime.state["report"], name))
    except KeyError:
        return "no such page"


@tool("look")
def look_at_nothing(name: str, runtime: ToolRuntime) -> str | list[dict[str, str]]:
    """Show a page."""
    found = look.func(name, runtime)
    return found if isinstance(found, str) else shown(hidden(runtime.state["report"]))


def reader(tools: list) -> object:
    made = create_agent(
        ChatOpenAI(model="policy"), tools, system_prompt=PROMPT, state_schema=Reader
    )
    return made.with_config(recursion_limit=10)  # five model calls; three are enough


agent, blind = reader([look]), reader([look_at_nothing])
