"""Rewards of the calls of workers, for presets that need them."""

from __future__ import annotations

from typing import Any

from teams import ANSWERS, EXPERT

from agentrl import Reward, Scope, Trace


def answers(task: dict[str, Any], trace: Trace) -> list[Reward]:
    """1 for the right word, if its worker is the one that knows; a worker that does not know can
    do nothing right or wrong, so its calls have no reward."""
    topic = task["input"]["topic"]
    return [
        Reward(
            name="answer",
            value=float((call.answer or {}).get("content") == ANSWERS[topic]),
            scope=Scope.TRANSITION,
            target=call.id,
        )
        for call in trace.transitions
        if call.role == EXPERT[topic]
    ]
