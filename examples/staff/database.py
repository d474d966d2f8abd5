"""The company database that the agent queries: 256 people in one table of a SQLite file.

`python database.py` writes it; so does `connect` when it is missing or older than this file.
"""

from __future__ import annotations

import random
import sqlite3
from pathlib import Path
from uuid import uuid4

FILE = Path(__file__).with_name("staff.db")
COLUMNS = ("team", "city", "title", "manager")

FIRST = "Ada Ben Cleo Dan Eva Finn Gail Hugo Ines Jon Kim Leo Mia Noel Olga Paul"
LAST = "Adler Berg Costa Diaz Ellis Frey Gomez Holt Ito Jung Klein Lund Mori Novak Pace Reed"
TEAM = "sales design legal finance support research security logistics training quality"
CITY = "Oslo Lima Cairo Delhi Porto Quito Seoul Tunis Turin Vienna"
TITLE = "engineer analyst lawyer writer planner buyer tester director editor chemist"


def people() -> list[tuple[str, str, str, str, str]]:
    """The rows of the table, the same every time: name, team, city, title, manager."""
    rng = random.Random("staff")
    names = [f"{first} {last}" for first in FIRST.split() for last in LAST.split()]
    rng.shuffle(names)
    return [
        (
            name,
            rng.choice(TEAM.split()),
            rng.choice(CITY.split()),
            rng.choice(TITLE.split()),
            rng.choice([other for other in names if other != name]),
        )
        for name in names
    ]


def create(file: Path) -> None:
    """Write the database atomically."""
    partial = file.with_suffix(f".{uuid4().hex}")
    connection = sqlite3.connect(partial)
    with connection:
        connection.execute(
            "CREATE TABLE staff (name TEXT PRIMARY KEY, team TEXT, city TEXT, title TEXT,"
            " manager TEXT REFERENCES staff (name))"
        )
        connection.executemany("INSERT INTO staff VALUES (?, ?, ?, ?, ?)", people())
    connection.close()
    partial.replace(file)


def connect() -> sqlite3.Connection:
    """A read-only connection for the calling thread."""
    if not FILE.exists() or FILE.stat().st_mtime < Path(__file__).stat().st_mtime:
        create(FILE)
    return sqlite3.connect(f"{FILE.as_uri()}?mode=ro", uri=True)


if __name__ == "__main__":
    create(FILE)
    print(f"{FILE}: {len(people())} people")
