"""Reward sentences of about eight words that name their subject."""


def verify(task: dict[str, str], result: str) -> dict[str, float]:
    words = result.lower().rstrip(".").split()
    length = max(0.0, 1 - abs(len(words) - 8) / 8)
    named = words.count(task["input"].split()[-1].lower()) == 1  # not the subject eight times
    return {"outcome": length * named, "length": length}
