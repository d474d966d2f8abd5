"""Scores a finished rollout: 1 if the agent's last message is exactly the answer, else 0."""


def verify(task: dict[str, str], result: str) -> float:
    return float(result.strip() == task["answer"])
