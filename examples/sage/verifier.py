"""Compute the answer to the question, and reward each call by its role.

The paper does not give its weights: those of `agentrl.algorithms.team_rewards` are ours, and so is
the choice to reward a critic only for its format.
"""

from __future__ import annotations

from statistics import fmean
from typing import Any

from board import HERE, MOVES, answer, parse, square

from agentrl import Reward, Scope, Trace, Transition
from agentrl.algorithms.team_rewards import sage_challenger, sage_planner, sage_solver


def verify(result: dict[str, Any], trace: Trace) -> list[Reward]:
    walk = parse(result["question"])
    right = None if walk is None else answer(*walk)
    hits = [float(said == right) for said in result.get("answers", [])]
    rows = [Reward(value=fmean(hits) if hits else 0.0)]
    for call in trace.transitions:
        value = paid(call, result, right, fmean(hits) if hits else None)
        rows.append(Reward(value=value, name="sage", scope=Scope.TRANSITION, target=call.id))
    return rows


def paid(
    call: Transition, result: dict[str, Any], right: str | None, solved: float | None
) -> float:
    said = ((call.answer or {}).get("content") or "").strip()
    form, use = float(well_formed(call.role, said)), result.get("use", 0.0)
    if call.role == "challenger":
        known = solved is not None  # the walk is valid, and passed the agent's gates
        return sage_challenger(result["quality"], form, solved or 0.0, valid=known)
    if call.role == "planner":
        return sage_planner(use, form)
    if call.role == "solver":
        return sage_solver(use, float(said == right), form)
    return form


def well_formed(role: str, said: str) -> bool:
    """Whether the text has its role's format: a walk, the rest of one, a square, or a rating."""
    if role == "challenger":
        return parse(said) is not None
    if role == "planner":
        moves, colon, start = said.rpartition(": ")
        known = set(moves.split()) <= MOVES.keys() and (start == HERE or square(start) is not None)
        return bool(colon) and known
    if role == "solver":
        return square(said) is not None
    return len(said) == 1 and said.isdigit()
