"""1 if the last number of the agent's answer is the sum, all others are of the question, and its
sentence does not deny it."""

from typing import Any

from agentrl.verify import number_in_text


def verify(task: dict[str, Any], result: str) -> float:
    return float(number_in_text(result, task["answer"], given=task["input"]))
