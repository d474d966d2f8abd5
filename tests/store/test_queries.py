"""The documented queries give the documented answers, asked with the documented tools."""

from __future__ import annotations

import asyncio
import json
import re
import sqlite3
from collections.abc import Callable
from pathlib import Path

import psycopg
import pytest
from click.testing import CliRunner
from sqlite_utils.cli import cli

from agentrl.store import open_store
from agentrl.store.sql import database
from tests.store.filled import fill

PAGE = (database.SQL_FOLDER.parent / "QUERIES.md").read_text(encoding="utf-8")
SECTIONS = re.findall(
    r"^## (.*?)\n.*?```sql\n(.*?)\n```\n```csv\n(.*?)```", PAGE, re.DOTALL | re.MULTILINE
)
(FUNCTIONS,) = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return asyncio.run(fill(tmp_path_factory.mktemp("filled") / "store.db"))


def sqlite_utils(*arguments: str) -> str:
    result = CliRunner().invoke(cli, arguments)
    assert result.exit_code == 0, result.output
    return result.stdout


def test_all_are_tested() -> None:
    assert len(SECTIONS) == PAGE.count("```sql") == 10


@pytest.mark.parametrize(("title", "sql", "answer"), SECTIONS, ids=[s[0] for s in SECTIONS])
def test_the_answer_is_as_documented(path: Path, title: str, sql: str, answer: str) -> None:
    found = sqlite_utils(str(path), sql, "--csv", "--functions", FUNCTIONS)
    assert found.splitlines() == answer.splitlines()
    assert len(found.splitlines()) > 1, title


def test_sqlite_utils_opens_the_file(path: Path) -> None:
    counts = {
        row["table"]: row["count"]
        for row in json.loads(sqlite_utils("tables", str(path), "--counts"))
    }
    assert (counts["rollouts"], counts["transitions"]) == (40, 71)
    rows = json.loads(sqlite_utils(str(path), "select id, state from rollouts limit 3"))
    assert rows[0] == {"id": "staff/eval/000000/score/0000", "state": "succeeded"}


def test_a_query_beside_a_writer_sees_what_is_committed(path: Path) -> None:
    conn = sqlite3.connect(path)
    conn.execute("update runs set step = 99")
    query = str(path), "select step from runs"
    assert json.loads(sqlite_utils(*query)) == [{"step": 3}]
    conn.rollback()
    conn.close()


def test_the_documented_session_of_psql_cannot_write(
    postgres: Callable[[], str], monkeypatch: pytest.MonkeyPatch
) -> None:
    url = postgres()
    asyncio.run(open_store(url).close())
    (options,) = re.findall(r'PGOPTIONS="(.*?)" psql', PAGE)
    with psycopg.connect(url, options=options) as conn:
        assert conn.execute("select count(*) from runs").fetchall() == [(0,)]
        with pytest.raises(psycopg.errors.ReadOnlySqlTransaction):
            conn.execute("delete from runs")
