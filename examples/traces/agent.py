"""A LangGraph agent of three nodes that answers customers of a shop, without training code.

`intake` reads the message and names the order and the problem; `clerk` sees these and the order's
record, never the message, and decides; `writer` sees the decision, and writes to the customer.
"""

from typing import TypedDict

from langchain_core.messages import HumanMessage, SystemMessage
from langchain_openai import ChatOpenAI
from langgraph.graph import END, START, StateGraph
from orders import record_of

INTAKE = "Name the order and the problem: late, broken or wrong."
CLERK = "Decide: refund, resend or wait."
WRITER = "Write one sentence to the customer."

model = ChatOpenAI(model="policy")


class State(TypedDict, total=False):
    message: str
    case: str
    decision: str
    reply: str


def ask(system: str, text: str) -> str:
    return model.invoke([SystemMessage(system), HumanMessage(text)]).text.strip()


def intake(state: State) -> State:
    return {"case": ask(INTAKE, state["message"])}


def clerk(state: State) -> State:
    return {"decision": ask(CLERK, f"{state['case']}\n{record_of(state['case'])}")}


def writer(state: State) -> State:
    return {"reply": ask(WRITER, f"{state['case']}\n{state['decision']}")}


graph = StateGraph(State)
for node in (intake, clerk, writer):
    graph.add_node(node.__name__, node)
graph.add_edge(START, "intake")
graph.add_edge("intake", "clerk")
graph.add_edge("clerk", "writer")
graph.add_edge("writer", END)
agent = graph.compile(name="shop")
