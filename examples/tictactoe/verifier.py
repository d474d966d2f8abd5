"""Success is not to lose: a perfect player cannot be beaten."""

from typing import Any


def verify(task: dict[str, Any], result: dict[str, Any]) -> float:
    seat = int(task["learner"].removeprefix("player_"))
    return float(result["returns"][seat] >= 0)
