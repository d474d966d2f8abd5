"""The team's outcome, and for every call whether it did its own part, independent of the others."""

from agent import look_up
from data import COLUMNS, TABLES

from agentrl import Reward, Scope, Trace, Transition


def verify(task: dict[str, str], result: str, trace: Trace) -> list[Reward]:
    rewards = [Reward(value=float(result == task["answer"]))]
    for call in trace.transitions:
        good = did_its_part(call, task["plan"])
        if good is not None:
            about = {"name": "part", "scope": Scope.TRANSITION, "target": call.id}
            rewards.append(Reward(value=float(good), **about))
    return rewards


def did_its_part(call: Transition, plan: str) -> bool | None:
    """Whether a call did its part; None for an unsolvable step."""
    asked, said = call.messages[-1]["content"], (call.answer or {}).get("content", "")
    if call.role == "planner":
        return said == plan
    if call.role == "critic":
        return said.strip() == ("accept" if asked.endswith(f"? {plan}") else "revise")
    column, _, name = asked.partition(" of ")
    known = [
        rows[name][column] for t, rows in TABLES.items() if column in COLUMNS[t] and name in rows
    ]
    return look_up(said) == known[0] if known else None
