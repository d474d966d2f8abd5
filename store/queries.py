"""SQL lives in `sql/*.sql`, one file per noun; each statement follows a line `-- name: <name>`.

It is written once, in what SQLite and PostgreSQL have in common, with parameters `:name` or `?`.
Where the two differ, or PostgreSQL needs a lock, `sql/postgres/<noun>.sql` has the statement of
the same name.
"""

from __future__ import annotations

import re
from functools import cache, cached_property
from pathlib import Path

FOLDER = Path(__file__).parent / "sql"
MARK = re.compile(r"^-- name: (\w+)$", re.MULTILINE)
NAMED = re.compile(r"(?<![:\w]):(\w+)")  # `:name`, but not the type in `::text`


class Statement(str):
    """SQL as SQLite reads it; `postgres` is the same for psycopg."""

    noun: str
    name: str

    @cached_property
    def postgres(self) -> str:
        sql = _read(f"postgres/{self.noun}").get(self.name, self)
        return NAMED.sub(r"%(\1)s", sql.replace("%", "%%")).replace("?", "%s")


def load(noun: str) -> dict[str, Statement]:
    """The statements of `sql/<noun>.sql` by name."""
    found = {}
    for name, sql in _read(noun).items():
        statement = found[name] = Statement(sql)
        statement.noun, statement.name = noun, name
    return found


@cache
def _read(file: str) -> dict[str, str]:
    path = FOLDER / f"{file}.sql"
    if not path.exists():
        return {}
    _, *parts = MARK.split(path.read_text(encoding="utf-8"))
    return {name: sql.strip() for name, sql in zip(parts[::2], parts[1::2], strict=True)}
