"""A LangGraph team that answers questions from a database: a planner, a solver and a critic.

The planner sees the question and writes a plan of lookups; the solver sees one step of the plan,
never the question, and writes its SQL; the critic sees question and plan, and may request a new
one. Run it with `agent.invoke({"messages": [("user", "What is the city of the team of Ada
Berg?")]})`.
"""

import sqlite3
from contextlib import closing
from typing import Literal

from data import connect
from langchain_core.messages import AIMessage, BaseMessage, SystemMessage
from langchain_openai import ChatOpenAI
from langgraph.graph import START, MessagesState, StateGraph

PLANNER = SystemMessage("Plan what to look up: NAME: COLUMN, COLUMN")
SOLVER = SystemMessage("Write SQL over people, teams and cities.")
CRITIC = SystemMessage("Is the plan right? accept or revise")
PLANS, STEPS = 2, 4  # most plans per question, steps per plan

model = ChatOpenAI(model="team")


class State(MessagesState):
    plans: list[BaseMessage]
    verdict: str


def planner(state: State) -> dict[str, object]:
    plans = state.get("plans", [])
    again = [message for plan in plans for message in (plan, ("user", "revise"))]
    return {"plans": [*plans, model.invoke([PLANNER, state["messages"][0], *again])]}


def critic(state: State) -> dict[str, object]:
    question, plan = state["messages"][0], state["plans"][-1]
    verdict = model.invoke([CRITIC, ("user", f"{question.text} {plan.text}")])
    return {"verdict": verdict.text.strip()}


def solver(state: State) -> dict[str, object]:
    found, _, steps = state["plans"][-1].text.partition(": ")
    for column in steps.split(", ")[:STEPS]:
        found = look_up(model.invoke([SOLVER, ("user", f"{column} of {found}")]).text)
    return {"messages": [AIMessage(found)]}


def look_up(sql: str) -> str:
    with closing(connect()) as database:  # LangGraph runs nodes in threads
        try:
            row = database.execute(sql).fetchone()
        except sqlite3.Error:
            return "error"
    return ", ".join(map(str, row)) if row else "nothing"


def judged(state: State) -> Literal["planner", "solver"]:
    revise = state["verdict"] == "revise" and len(state["plans"]) < PLANS
    return "planner" if revise else "solver"


graph = StateGraph(State)
graph.add_node("planner", planner)
graph.add_node("critic", critic)
graph.add_node("solver", solver)
graph.add_edge(START, "planner")
graph.add_edge("planner", "critic")
graph.add_conditional_edges("critic", judged)
agent = graph.compile()
