"""A LangGraph supervisor that hands a sum to a solver with a tool, and its answer to a critic."""

from typing import Annotated, Literal, TypedDict

from langchain.agents import create_agent
from langchain_openai import ChatOpenAI
from langgraph.graph import START, StateGraph
from langgraph.graph.message import add_messages
from langgraph.types import Command

model = ChatOpenAI(model="policy", streaming=True)
ROUTE = "Who is next? Reply solver, critic or end."


class State(TypedDict):
    messages: Annotated[list, add_messages]


def add(a: int, b: int) -> int:
    """Add two numbers."""
    return a + b


async def supervisor(state: State) -> Command[Literal["solver", "critic", "__end__"]]:
    said = str((await model.ainvoke([("system", ROUTE), *state["messages"]])).content)
    return Command(goto=next((n for n in ("solver", "critic") if n in said), "__end__"))


solver = create_agent(model, [add], system_prompt="Solve it with the tool. Reply with the number.")
critic = create_agent(model, system_prompt="Check the answer: right or wrong?")
graph = StateGraph(State)
graph.add_node(supervisor).add_node("solver", solver).add_node("critic", critic)
graph.add_edge(START, "supervisor").add_edge("solver", "supervisor").add_edge(
    "critic", "supervisor"
)
agent = graph.compile()
