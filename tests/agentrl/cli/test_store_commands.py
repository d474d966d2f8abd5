"""`agentrl store ...`: what it prints and what it refuses."""

from __future__ import annotations

import asyncio
import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from agentrl.cli.main import cli
from agentrl.core.errors import StoreError
from agentrl.store import Store, open_store
from tests.benchmarks import store_load as load
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
    assert " now" in run("prune", "--older-than", "7d", "--vacuum").stdout
    assert path.stat().st_size < size


def test_a_vacuum_alone_removes_no_rows(path: Path) -> None:
    before = json.loads(run("stats", "--json").stdout)["rows"]
    said = run("prune", "--vacuum").stdout
    assert re.fullmatch(r"[^\n]+ before, [^\n]+ now\n", said)
    assert json.loads(run("stats", "--json").stdout)["rows"] == before


@pytest.mark.parametrize("limits", [(), ("--keep-last", "1"), ("--run", "staff")])
def test_a_vacuum_cannot_be_tried(path: Path, limits: tuple[str, ...]) -> None:
    result = CliRunner().invoke(cli, ["store", "prune", "--vacuum", "--dry-run", *limits])
    assert result.exit_code == 2
    assert "a vacuum cannot be tried" in result.output


@pytest.mark.parametrize("age", ["7", "d7", "-7d", "7 d", "1y"])
def test_an_age_has_a_unit(path: Path, age: str) -> None:
    result = CliRunner().invoke(cli, ["store", "prune", f"--older-than={age}"])
    assert result.exit_code == 2
    assert "write it as" in result.output


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


def test_a_backup_under_load_is_a_whole_store(tmp_path: Path) -> None:
    """Groups are enqueued four rollouts at a time, so a whole copy has a multiple of four."""
    url, copies = f"sqlite:///{tmp_path / 'store.db'}", [tmp_path / f"{n}.db" for n in range(4)]

    async def write(store: Store, stop: asyncio.Event) -> int:
        groups = 0
        while not stop.is_set():
            await store.enqueue(load.rollouts(f"g{groups}", 4))
            groups += 1
        return groups

    async def check() -> list[int]:
        stop = asyncio.Event()
        async with open_store(url) as store:
            await store.open_run("run", {})
            writer = asyncio.create_task(write(store, stop))
            for copy in copies:
                before = (await store.counts("run")).queued
                await asyncio.to_thread(run, "backup", url, str(copy))
                assert (await store.counts("run")).queued > before, "writers go on"
            stop.set()
            groups = await writer
        found = []
        for copy in copies:
            async with open_store(str(copy)) as store:
                found.append((await store.counts("run")).queued)
                assert len(await store.rollouts("run")) == found[-1]
        assert found[-1] <= 4 * groups
        return found

    found = asyncio.run(check())
    assert found == sorted(found)
    assert found[-1] > 0
    assert not any(count % 4 for count in found)
    assert "Name a new file" in refused("backup", url, str(copies[0]))


@pytest.mark.skipif(shutil.which("pg_dump") is None, reason="there is no pg_dump")
def test_a_backup_of_postgres_is_restored(server: Any, tmp_path: Path) -> None:
    url, other, file = server.make(), server.make(), tmp_path / "copy.dump"

    async def fill_in() -> None:
        async with open_store(url) as store:
            await store.open_run("run", {})
            await store.enqueue(load.rollouts("g", 4))

    async def count() -> int:
        async with open_store(other) as store:
            return (await store.counts("run")).queued

    asyncio.run(fill_in())
    run("backup", url, str(file))
    subprocess.run(["pg_restore", f"--dbname={other}", str(file)], check=True)
    assert asyncio.run(count()) == 4


def test_a_served_store_is_backed_up_where_it_is(tmp_path: Path) -> None:
    assert "behind a server" in refused("backup", "http://127.0.0.1:9", str(tmp_path / "copy"))
