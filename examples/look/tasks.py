"""Questions about reports. Held-out reports have other numbers, and pages of other sizes."""

from __future__ import annotations

from typing import Any, TypedDict

from charts import HELDOUT, report

QUESTION = "On which day did the best shop sell most?"


class Task(TypedDict):
    id: str
    input: dict[str, Any]  # what the agent begins with
    answer: str  # for the verifier


def task(number: int) -> Task:
    messages = [{"role": "user", "content": QUESTION}]
    return Task(
        id=f"report {number}",
        input={"messages": messages, "report": number},
        answer=report(number).answer,
    )


train = [task(number) for number in range(2000)]
heldout = [task(HELDOUT + number) for number in range(200)]
