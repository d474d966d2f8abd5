"""`agentrl store ...`: what it prints and what it refuses."""

from __future__ import annotations

import asyncio
import json
import shutil
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from agentrl.cli.main import cli
from agentrl.errors import StoreError
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
