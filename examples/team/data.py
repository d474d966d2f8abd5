"""The database: three tables that refer to each other, the same in every process."""

from __future__ import annotations

import random
import sqlite3

FIRST = "Ada Ben Cleo Dan Eva Finn Gail Hugo Ines Jon Kim Leo Mia Noel Olga Paul"
LAST = "Adler Berg Costa Diaz Ellis Frey Gomez Holt Ito Jung Klein Lund Mori Novak"
TEAMS = "sales design legal finance support research security logistics"
CITIES = "Oslo Lima Cairo Delhi Porto Quito Seoul Tunis"
COUNTRIES = "Norway Peru Egypt India Portugal Ecuador Korea Tunisia"
POINTS_TO = {"team": "teams", "manager": "people", "city": "cities", "lead": "people"}
COLUMNS = {
    "people": ("team", "manager", "city"),
    "teams": ("city", "lead"),
    "cities": ("country", "mayor"),
}
MEMORY = "file:team?mode=memory&cache=shared"


def tables() -> dict[str, dict[str, dict[str, str]]]:
    """Table -> name -> column -> value."""
    rng = random.Random("team")
    names = [f"{first} {last}" for first in FIRST.split() for last in LAST.split()]
    rng.shuffle(names)
    teams, cities = TEAMS.split(), CITIES.split()
    values = {"team": teams, "city": cities, "country": COUNTRIES.split()}
    rows = {"people": names, "teams": teams, "cities": cities}
    return {
        table: {
            name: {column: rng.choice(values.get(column, names)) for column in COLUMNS[table]}
            for name in rows[table]
        }
        for table in COLUMNS
    }


TABLES = tables()


def fill() -> sqlite3.Connection:
    """Write the tables to an in-memory database, which exists as long as this connection."""
    connection = sqlite3.connect(MEMORY, uri=True, check_same_thread=False)
    with connection:
        for table, rows in TABLES.items():
            columns = COLUMNS[table]
            connection.execute(f"CREATE TABLE {table} (name PRIMARY KEY, {', '.join(columns)})")
            marks = ", ".join("?" * (1 + len(columns)))
            values = [(name, *row.values()) for name, row in rows.items()]
            connection.executemany(f"INSERT INTO {table} VALUES ({marks})", values)
    return connection


def connect() -> sqlite3.Connection:
    """A read connection for the calling thread."""
    connection = sqlite3.connect(MEMORY, uri=True)
    connection.execute("PRAGMA query_only = on")
    return connection


KEEPER = fill()
