"""1 if the last number of the agent's answer is the sum."""

import re


def verify(task: dict[str, int], result: str) -> float:
    return float(re.findall(r"\d+", str(result))[-1:] == [str(task["answer"])])
