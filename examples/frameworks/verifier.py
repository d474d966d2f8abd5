"""1 if the sum is in the agent's answer."""

import re


def verify(task: dict[str, int], result: str) -> float:
    return float(str(task["answer"]) in re.findall(r"\d+", str(result)))
