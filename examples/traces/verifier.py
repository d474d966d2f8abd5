"""Right if the customer reads what a good trace of the task has told, which feedback is about."""

from typing import Any


def verify(task: dict[str, Any], result: dict[str, Any]) -> float:
    return float(result["reply"] == task["expected"]["reply"])
