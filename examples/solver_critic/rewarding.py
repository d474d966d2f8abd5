"""The same graph with a process reward from inside: the critic's node scores its own verdict.

`agentrl train examples/solver_critic/run.toml agent.path=rewarding.py:agent`. `agentrl.reward` does
nothing outside of a rollout, so this graph also runs without training.
"""

from typing import Any

from agent import State, again, critic, solver
from langgraph.graph import START, StateGraph

import agentrl


def brief_critic(state: State) -> dict[str, Any]:
    update = critic(state)
    brief = update["verdict"] in ("right", "wrong")
    agentrl.reward(float(brief), "brief")  # rewards the critic's last model call
    return update


graph = StateGraph(State)
graph.add_node("solver", solver)
graph.add_node("critic", brief_critic)
graph.add_edge(START, "solver")
graph.add_edge("solver", "critic")
graph.add_conditional_edges("critic", again)
agent = graph.compile()
