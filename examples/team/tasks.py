"""Questions of one to three steps. Held-out questions are about people of no training question."""

from __future__ import annotations

from data import COLUMNS, POINTS_TO, TABLES

DEPTH = 3
HELDOUT_PEOPLE = 40


def paths(table: str, depth: int) -> list[tuple[str, ...]]:
    """All paths of columns from a row of the table."""
    if not depth:
        return []
    found: list[tuple[str, ...]] = []
    for column in COLUMNS.get(table, ()):
        onward = paths(POINTS_TO.get(column, ""), depth - 1)
        found += [(column,), *((column, *path) for path in onward)]
    return found


def follow(name: str, path: tuple[str, ...]) -> str:
    """The end of a path from a person."""
    table = "people"
    for column in path:
        name = TABLES[table][name][column]
        table = POINTS_TO.get(column, "")
    return name


def task(person: str, path: tuple[str, ...]) -> dict[str, object]:
    asked = "".join(f"the {column} of " for column in reversed(path))
    return {
        "id": f"{person}/{'/'.join(path)}",
        "input": f"What is {asked}{person}?",  # the only field that the team sees
        "answer": follow(person, path),
        "plan": f"{person}: {', '.join(path)}",
    }


PATHS = paths("people", DEPTH)
PEOPLE = list(TABLES["people"])
heldout = [task(person, path) for person in PEOPLE[:HELDOUT_PEOPLE] for path in PATHS]
train = [task(person, path) for person in PEOPLE[HELDOUT_PEOPLE:] for path in PATHS]
