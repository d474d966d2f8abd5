"""Questions about the staff; half of them need the result of one query to write the next.

The split is by person: nobody asked about in a held-out task is asked about in a training task.
"""

from __future__ import annotations

from typing import TypedDict

from database import COLUMNS, people

ASKED = ("team", "city", "title")
HELDOUT_PEOPLE = 40


class Task(TypedDict):
    id: str
    input: str  # the only field that the agent sees
    answer: str  # for the verifier
    person: str
    path: list[str]  # the columns to look up, each for the person found by the previous one


def questions(person: str) -> list[Task]:
    """What is the city of Ada Berg? What is the city of the manager of Ada Berg? And so on."""
    direct = [[column] for column in ASKED]
    return [task(person, path) for path in [*direct, *(["manager", *path] for path in direct)]]


def task(person: str, path: list[str]) -> Task:
    answer = person
    for column in path:
        answer = STAFF[answer][column]
    asked = "".join(f"the {column} of " for column in reversed(path))
    return Task(
        id=f"{person}/{'/'.join(path)}",
        input=f"What is {asked}{person}?",
        answer=answer,
        person=person,
        path=path,
    )


STAFF = {name: dict(zip(COLUMNS, values, strict=True)) for name, *values in people()}
heldout = [task for person in list(STAFF)[:HELDOUT_PEOPLE] for task in questions(person)]
train = [task for person in list(STAFF)[HELDOUT_PEOPLE:] for task in questions(person)]
