"""People's preferences. They determine the labels of pairs and the held-out scores; no policy is
trained on them."""

from typing import Any


def verify(task: dict[str, Any], result: str) -> float:
    """1 for the words after "sure", half of that for the words alone, else 0."""
    said, words = result.split(), task["input"].split()
    return 1.0 if said == ["sure", *words] else 0.5 if said == words else 0.0
