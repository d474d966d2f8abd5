"""Right if the last number of the answer is the product, such as 3,225 or 3225, all others are of
the question, and its sentence does not deny it."""

import re
from typing import Any

DENIAL = re.compile(r"\b(?:not|no|nor|never|neither|cannot|wrong)\b|n['\u2019]t\b", re.IGNORECASE)


def verify(task: dict[str, Any], result: str) -> float:
    answer, text = str(task["answer"]), result.replace(",", "")
    *others, last = re.findall(r"-?\d+", text) or [""]
    is_guess = {*others} - {*re.findall(r"\d+", task["input"])}
    return float(last == answer and not is_guess and not is_denied(answer, text))


def is_denied(answer: str, text: str) -> bool:
    """Whether a sentence says no of the answer, such as "It is not 16."."""
    sentences = re.split(r"[.!?\n]", text)
    return any(answer in sentence and DENIAL.search(sentence) for sentence in sentences)
