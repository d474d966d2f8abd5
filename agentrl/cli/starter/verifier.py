"""The verifier: the reward of one rollout, higher is better.

It is given those of `task`, `result` and `trace` that it names, and returns a number or named
numbers.
"""

from typing import Any


def verify(task: dict[str, Any], result: str) -> float:
    return float(result.strip() == task["answer"])
