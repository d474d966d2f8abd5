"""A LangGraph agent with two roles: a solver proposes a sum, a critic accepts or rejects it.

Run it with `agent.invoke({"messages": [("user", "17 + 25")]})`.
"""

from typing import Literal

from langchain_core.messages import BaseMessage, SystemMessage
from langchain_openai import ChatOpenAI
from langgraph.graph import END, START, MessagesState, StateGraph

SOLVER = SystemMessage("You add numbers. Reply with the sum alone, digits only.")
CRITIC = SystemMessage("You check sums. Reply 'right' or 'wrong', nothing else.")
TRIES = 2

model = ChatOpenAI(model="policy")


class State(MessagesState):
    tries: int
    verdict: str


def solver(state: State) -> dict[str, object]:
    answer = model.invoke([SOLVER, state["messages"][0]])
    return {"messages": [answer], "tries": state.get("tries", 0) + 1}


def critic(state: State) -> dict[str, object]:
    question, proposal = state["messages"][0], state["messages"][-1]
    verdict = model.invoke([CRITIC, *asked(question, proposal)])
    return {"verdict": str(verdict.text).strip().lower()}


def asked(question: BaseMessage, proposal: BaseMessage) -> list[tuple[str, str]]:
    return [("user", f"{question.text} = {proposal.text}")]


def again(state: State) -> Literal["solver", "__end__"]:
    return "solver" if state["verdict"] == "wrong" and state["tries"] < TRIES else END


graph = StateGraph(State)
graph.add_node("solver", solver)
graph.add_node("critic", critic)
graph.add_edge(START, "solver")
graph.add_edge("solver", "critic")
graph.add_conditional_edges("critic", again)
agent = graph.compile()
