"""Runs the question that was asked, and pays each call by its role."""

from __future__ import annotations

from statistics import fmean
from typing import Any

import rewards
from lists import WORDS, answer, parse

from agentrl import Reward, Scope, Trace, Transition


def verify(result: dict[str, Any], trace: Trace) -> list[Reward]:
    program = parse(result["question"])
    right = None if program is None else answer(*program)
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
        return rewards.challenger(result["quality"], solved, form)
    if call.role == "planner":
        return rewards.planner(use, form)
    if call.role == "solver":
        return rewards.solver(use, float(said == right), form)
    return rewards.critic(form)


def well_formed(role: str, said: str) -> bool:
    """Whether it is a program, the rest of one, a list of words, or a rating."""
    if role == "critic":
        return len(said) == 1 and said.isdigit()
    words = said if role == "solver" else said.partition(":")[2]
    known = bool(words.split()) and set(words.split()) <= set(WORDS)
    return known and (role == "planner" or role == "solver" or parse(said) is not None)
