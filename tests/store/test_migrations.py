"""The mechanism of migrations: a store of an older schema gets the scripts that it lacks, once."""

from __future__ import annotations

import asyncio
import contextlib
import sqlite3
from pathlib import Path

import pytest

from agentrl.core.errors import StoreError
from agentrl.store import open_store, sqlite
from agentrl.store.sqlite import Location
from tests.store.conftest import DATABASES

LATER = "0002_mood"
ADDED = "alter table runs add column mood text not null default 'calm';\n"
BROKEN = ADDED + "alter table nothing add column mood text;\n"


@pytest.fixture(params=DATABASES)
def path(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """A store of the first schema, with a run."""
    server = request.param == "postgres"
    path = request.getfixturevalue("server").make() if server else str(tmp_path / "store.db")

    async def fill() -> None:
        async with open_store(path) as store:
            await store.open_run("run", {"seed": 4})

    asyncio.run(fill())
    return str(path)


def add(script: str, path: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Add a later script to those of this version."""
    file = folder / f"{LATER}.sql"
    file.write_text(script, encoding="utf-8")
    monkeypatch.setitem(sqlite.SCRIPTS, LATER, file)
    if path.startswith("postgres"):
        from agentrl.store.postgres import store as postgres_migrations

        monkeypatch.setitem(postgres_migrations.SCRIPTS, LATER, file)


def moods(path: str) -> list[str]:
    if path.startswith("postgres"):
        from agentrl.store.postgres.connection import PostgresServer

        with PostgresServer.parse(path).connect() as conn:
            return [row["mood"] for row in conn.execute("select mood from runs")]
    with contextlib.closing(sqlite3.connect(path)) as conn:
        return [mood for (mood,) in conn.execute("select mood from runs")]


async def test_a_missing_script_is_applied_once(
    path: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By eight that open the store at the same time; what it holds stays."""
    add(ADDED, path, tmp_path, monkeypatch)
    stores = await asyncio.gather(*(asyncio.to_thread(open_store, path) for _ in range(8)))
    assert await stores[0].runs() == ["run"]
    for store in stores:
        await store.close()
    assert moods(path) == ["calm"]


async def test_a_script_that_fails_changes_nothing(
    path: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        add(BROKEN, path, tmp_path, patch)
        with pytest.raises(StoreError):
            open_store(path)
    add(ADDED, path, tmp_path, monkeypatch)
    await open_store(path).close()
    assert moods(path) == ["calm"]


async def test_an_older_store_is_not_read_only(
    path: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    add(ADDED, path, tmp_path, monkeypatch)
    file = Path(path)
    before = file.read_bytes() if file.is_file() else None
    with pytest.raises(StoreError, match=f"older agentrl .it lacks {LATER}."):
        open_store(path, readonly=True)
    assert (file.read_bytes() if file.is_file() else None) == before


async def test_a_newer_store_is_not_opened(
    path: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        add(ADDED, path, tmp_path, patch)
        await open_store(path).close()
    with pytest.raises(StoreError, match=f"newer agentrl .schema {LATER}.: upgrade"):
        open_store(path)


def test_a_store_may_be_created_while_another_process_looks_at_it(tmp_path: Path) -> None:
    location = Location(tmp_path / "store.db")

    class Slow(sqlite3.Connection):
        def execute(self, *statement):  # type: ignore[no-untyped-def]
            found = super().execute(*statement).fetchall()
            sqlite.prepare(location)
            return self.cursor().execute("values (?)", found[0])

    with contextlib.closing(sqlite3.connect(location.path, factory=Slow)) as conn:
        sqlite._check_header(conn, location)  # type: ignore[arg-type]
