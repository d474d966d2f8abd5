"""Whether the answer is right, and the return: the same minus the cost of its tokens."""

from __future__ import annotations

from typing import Any

from agent import MOST

PRICE = 0.1  # of so many tokens


def verify(task: dict[str, Any], result: dict[str, Any]) -> dict[str, float]:
    right = float(result["answer"] == task["input"]["answer"])
    return {"outcome": right, "return": right - PRICE * min(result["tokens"] / MOST, 1.0)}
