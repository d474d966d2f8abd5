"""The documented queries give the documented answers, and other tools open the file."""

from __future__ import annotations

import asyncio
import csv
import io
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from agentrl.store import queries
from agentrl.store.readonly import ask
from tests.store.filled import fill

PAGE = (queries.FOLDER.parent / "QUERIES.md").read_text(encoding="utf-8")
SECTIONS = re.findall(
    r"^## (.*?)\n.*?```sql\n(.*?)\n```\n```csv\n(.*?)```", PAGE, re.DOTALL | re.MULTILINE
)


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return asyncio.run(fill(tmp_path_factory.mktemp("filled") / "store.db"))


def test_all_are_tested() -> None:
    assert len(SECTIONS) == PAGE.count("```sql") == 10


@pytest.mark.parametrize(("title", "sql", "answer"), SECTIONS, ids=[s[0] for s in SECTIONS])
def test_the_answer_is_as_documented(path: Path, title: str, sql: str, answer: str) -> None:
    found = ask(str(path), sql, limit=100)
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerows([found.columns, *found.rows])
    assert text.getvalue() == answer
    assert found.rows, title


def sqlite_utils(*arguments: str) -> str:
    command = [sys.executable, "-m", "sqlite_utils", *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=True, timeout=60).stdout


def test_sqlite_utils_opens_the_file(path: Path) -> None:
    counts = {
        row["table"]: row["count"]
        for row in json.loads(sqlite_utils("tables", str(path), "--counts"))
    }
    assert (counts["rollouts"], counts["transitions"]) == (40, 71)
    rows = json.loads(sqlite_utils(str(path), "select id, state from rollouts limit 3"))
    assert rows[0] == {"id": "staff/eval/000000/score/0000", "state": "succeeded"}
