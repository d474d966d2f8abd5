"""Right if the price is the only number of the answer, and its sentence does not deny it."""

from typing import Any

from agentrl.verify import number_in_text


def verify(task: dict[str, Any], result: str) -> float:
    return float(number_in_text(result, task["answer"]))
