"""`agentrl store ...`: what it prints, and that a query changes nothing."""

from __future__ import annotations

import asyncio
import csv
import io
import json
import shutil
import sqlite3
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from agentrl.cli.main import cli
from agentrl.errors import Invalid, NotFound, StoreError, Unavailable
from agentrl.store.readonly import ask
from tests.store.filled import fill


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return asyncio.run(fill(tmp_path_factory.mktemp("filled") / "store.db"))


@pytest.fixture
def path(original: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The only store below runs/ of the working folder."""
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "runs" / "staff" / "store.db"
    path.parent.mkdir(parents=True)
    return Path(shutil.copy(original, path))


def run(*arguments: str) -> Result:
    result = CliRunner().invoke(cli, ["store", *arguments])
    assert result.exit_code == 0, result.output
    return result


def refused(*arguments: str) -> str:
    """The sentence with which a command is refused."""
    error = CliRunner().invoke(cli, ["store", *arguments]).exception
    assert isinstance(error, StoreError)
    assert "\n" not in str(error)
    return str(error)


def test_stats(path: Path) -> None:
    found = json.loads(run("stats", "--json").stdout)
    assert found["rows"]["transitions"] == 71
    text = run("stats").stdout
    assert "transitions            71" in text
    assert f"cursor {found['cursor']}" in text


def test_prune_then_vacuum(path: Path) -> None:
    would = run("prune", "--keep-last", "1", "--dry-run").stdout
    did = run("prune", "--keep-last", "1").stdout
    assert would.startswith("Would remove 20 rollouts, 20 attempts, ")
    assert did.removeprefix("Removed") == would.removeprefix("Would remove")
    assert run("prune", "--older-than", "7d").stdout.startswith("Removed 8 rollouts, ")
    size = path.stat().st_size
    assert " now" in run("vacuum").stdout
    assert path.stat().st_size < size


@pytest.mark.parametrize("age", ["7", "d7", "-7d", "7 d", "1y"])
def test_an_age_has_a_unit(path: Path, age: str) -> None:
    result = CliRunner().invoke(cli, ["store", "prune", f"--older-than={age}"])
    assert result.exit_code == 2
    assert "write it like" in result.output


def test_which_store(tmp_path: Path, path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert refused("prune", "--run", "nobody", "--keep-last", "1").startswith("There is no run")
    shutil.copytree("runs/staff", "runs/other")
    assert refused("stats") == (
        "There are 2 stores below runs/ (runs/other/store.db, runs/staff/store.db): choose one "
        "with --store."
    )
    assert run("stats", "--store", "sqlite:///runs/other/store.db").stdout
    monkeypatch.chdir(path.parent)
    assert refused("stats") == "There is no store below runs/: name one with --store."
    assert "no store at" in refused("stats", "--store", "sqlite:///missing.db")


def test_formats(path: Path) -> None:
    sql = (
        "select t.id, tokens(prompt) as new, logprobs(logprobs) as lp, digest, null as void "
        "from transitions t order by seq"
    )
    (row,) = json.loads(run("query", sql, "--format", "json", "--limit", "1").stdout)
    assert (row["new"], row["lp"], row["void"]) == ("[101,7592,102]", "[-0.5,-1.5]", None)
    assert len(row["digest"]) == 32
    result = run("query", sql, "--format", "csv", "--limit", "2")
    header, first, _ = csv.reader(io.StringIO(result.stdout))
    assert header == ["id", "new", "lp", "digest", "void"]
    assert first == [row["id"], row["new"], row["lp"], row["digest"], ""]
    assert result.stderr == "There are more than 2 rows: raise --limit.\n"
    table = run("query", "select 'x [red]' as a, zeroblob(99) as b").stdout
    assert "x [red]" in table
    assert "<99 bytes>" in table
    assert run("query", "select 1 as a where 0", "--format", "json").stdout == "[]\n"
    assert "same name" in refused("query", "select 1 as a, 2 as a", "--format", "json")


WRITES = [
    "delete from rollouts",
    "update runs set step = 0",
    "insert into runs select * from runs",
    "with x as (select 1) delete from rollouts",
    "drop table spans",
    "create temp table t (x)",
    "create view v as select 1",
    "attach 'other.db' as other",
    "vacuum",
    "vacuum into 'copy.db'",
    "begin immediate",
    "pragma journal_mode = delete",
    "pragma query_only = off",
    "pragma user_version = 3",
    "reindex",
    "analyze",
]


@pytest.mark.parametrize("sql", WRITES)
def test_a_query_changes_nothing(path: Path, sql: str) -> None:
    before = path.read_bytes()
    with pytest.raises(Invalid, match="A query only reads"):
        ask(str(path), sql, limit=9)
    assert path.read_bytes() == before
    assert [entry.name for entry in Path().iterdir()] == ["runs"]


@pytest.mark.parametrize(
    ("sql", "why"),
    [
        ("selec 1", "The query is wrong: near"),
        ("select missing", "no such column: missing"),
        ("select 1; delete from rollouts", "A query is one statement."),
        ("select load_extension('x')", "not authorized"),
        ("select tokens(1)", "take a column of them"),
        ("", "A query only reads"),
    ],
)
def test_a_wrong_query(path: Path, sql: str, why: str) -> None:
    with pytest.raises(Invalid) as caught:
        ask(str(path), sql, limit=9)
    assert why in str(caught.value)


def test_a_query_beside_a_writer(path: Path) -> None:
    """It sees what is committed, and waits for nobody."""
    conn = sqlite3.connect(path)
    conn.execute("update runs set step = 99")
    assert ask(str(path), "select step from runs", limit=1).rows == [[3]]
    conn.commit()
    assert ask(str(path), "select step from runs", limit=1).rows == [[99]]
    conn.close()


def test_what_cannot_be_asked(tmp_path: Path) -> None:
    with pytest.raises(Invalid, match="answers no SQL"):
        ask("http://127.0.0.1:1", "select 1", limit=1)
    with pytest.raises(NotFound, match="no store at"):
        ask(str(tmp_path / "missing.db"), "select 1", limit=1)
    (tmp_path / "notes.txt").write_text("dear diary, " * 100)
    with pytest.raises(Unavailable, match="not an SQLite database"):
        ask(str(tmp_path / "notes.txt"), "select * from runs", limit=1)
