"""Rewards of the calls of workers, for presets that need them."""

from __future__ import annotations

from typing import Any

from teams import ANSWERS, EXPERT

from agentrl import Reward, Scope, Trace, Transition


def answers(task: dict[str, Any], trace: Trace) -> list[Reward]:
    """1 for the right word of the worker that knows, else 0. The preset reads those of workers and
    compares each with its own, so one that does not know learns nothing."""
    topic = task["input"]["topic"]

    def value(call: Transition) -> float:
        said = (call.answer or {}).get("content")
        return float(call.role == EXPERT[topic] and said == ANSWERS[topic])

    scope = Scope.TRANSITION
    return [
        Reward(name="answer", value=value(call), scope=scope, target=call.id)
        for call in trace.transitions
    ]
