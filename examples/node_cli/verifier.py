"""The fraction of letters at the right position."""


def verify(task: dict[str, str], result: dict[str, str]) -> float:
    final, answer = result["final"].lower(), task["answer"]
    hits = sum(a == b for a, b in zip(final, answer, strict=False))
    return hits / max(len(final), len(answer))
