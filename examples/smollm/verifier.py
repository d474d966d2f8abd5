"""Right if the price is the only number of the answer, and its sentence does not deny it."""

import re
from typing import Any

DENIAL = re.compile(r"\b(?:not|no|nor|never|neither|cannot|wrong)\b|n['\u2019]t\b", re.IGNORECASE)


def verify(task: dict[str, Any], result: str) -> float:
    answer, numbers = str(task["answer"]), re.findall(r"-?\d+", result)
    return float(numbers == [answer] and not is_denied(answer, result))


def is_denied(answer: str, text: str) -> bool:
    """Whether a sentence says no of the answer, such as "It is not 16."."""
    sentences = re.split(r"[.!?\n]", text)
    return any(answer in sentence and DENIAL.search(sentence) for sentence in sentences)
