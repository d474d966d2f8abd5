"""The outcome, 1 if the answer is right, and the return: the outcome minus the cost of tokens."""

from __future__ import annotations

from typing import Any

from agent import MAX_TOKENS

PRICE = 0.1  # of so many tokens


def verify(task: dict[str, Any], result: dict[str, Any]) -> dict[str, float]:
    right = float(result["answer"] == task["input"]["answer"])
    return {"outcome": right, "return": right - PRICE * min(result["tokens"] / MAX_TOKENS, 1.0)}
