"""1 if the amount is right to the cent; a little for an answer that is at least a number."""


def verify(task: dict[str, str], result: str) -> dict[str, float]:
    try:
        off = abs(float(result) - float(task["answer"]))
    except ValueError:
        return {"outcome": 0.0, "number": 0.0}
    return {"outcome": float(off < 0.005), "number": 1.0}
