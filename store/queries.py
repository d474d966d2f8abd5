"""SQL lives in `sql/*.sql`, one file per noun; each statement follows a line `-- name: <name>`."""

from __future__ import annotations

import re
from pathlib import Path

FOLDER = Path(__file__).parent / "sql"
MARK = re.compile(r"^-- name: (\w+)$", re.MULTILINE)


def load(noun: str) -> dict[str, str]:
    """The statements of `sql/<noun>.sql` by name."""
    _, *parts = MARK.split((FOLDER / f"{noun}.sql").read_text(encoding="utf-8"))
    return {name: sql.strip() for name, sql in zip(parts[::2], parts[1::2], strict=True)}
