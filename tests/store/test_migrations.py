"""Every schema there ever was is brought to the present one, with what is in it."""

from __future__ import annotations

import contextlib
import re
import sqlite3
from pathlib import Path

import pytest
from sqlite_utils import Database

from agentrl.store import open_store
from agentrl.store.sqlite import migrations
from agentrl.store.sqlite.connection import Location
from agentrl.types import Counts, ErrorKind, RolloutState, float32, int32
from tests.store.conftest import DATABASES

SCHEMAS = Path(__file__).with_name("schemas")
NAMES = list(migrations.SCRIPTS)


@pytest.fixture(params=NAMES)
def schema(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(params=DATABASES)
def path(request: pytest.FixtureRequest, schema: str, tmp_path: Path) -> str:
    """A store of that schema, grown out of one of the first in which everything has happened."""
    rows = (SCHEMAS / "0001.sql").read_text(encoding="utf-8")
    if request.param == "postgres":
        return postgres_of(request.getfixturevalue("server").make(), schema, rows)
    path = tmp_path / "store.db"
    conn = Location(path).connect()
    conn.execute("pragma journal_mode = wal")
    conn.execute(f"pragma application_id = {migrations.APPLICATION_ID}")
    upto(conn, NAMES[0])
    conn.executescript(rows)
    upto(conn, schema)
    assert migrations.pending(conn, Location(path)) == NAMES[NAMES.index(schema) + 1 :]
    conn.close()
    return str(path)


def postgres_of(url: str, name: str, rows: str) -> str:
    from agentrl.store.postgres import migrations as postgres_migrations
    from agentrl.store.postgres.connection import PostgresServer

    server, scripts = PostgresServer.parse(url), dict(postgres_migrations.SCRIPTS)
    with server.connect() as conn, pytest.MonkeyPatch.context() as patch:
        for last in (NAMES[0], name):
            known = {one: scripts[one] for one in NAMES[: NAMES.index(last) + 1]}
            patch.setattr(postgres_migrations, "SCRIPTS", known)
            postgres_migrations.prepare(server)
            if rows:
                conn.execute(re.sub(r"X'(\w*)'", r"'\\x\1'", rows).encode())
                for table in ("rollouts", "transitions", "events"):
                    highest = f"(select max(seq) from {table})"
                    sequence = f"pg_get_serial_sequence('{table}', 'seq')"
                    conn.execute(f"select setval({sequence}, {highest})".encode())
            rows = ""
        patch.undo()
        assert (
            postgres_migrations.pending(conn, server, create=False)
            == NAMES[NAMES.index(name) + 1 :]
        )
    return url


def upto(conn: sqlite3.Connection, last: str) -> None:
    after = NAMES[NAMES.index(last) + 1 :]
    stop = {"stop_before": after[0]} if after else {}
    migrations.migrations().apply(Database(conn, execute_plugins=False), **stop)


async def test_upward_from_every_schema(path: str) -> None:
    async with open_store(path, clock=lambda: 1_700_000_011.0) as store:
        assert await store.counts("run") == Counts(
            queued=2,
            running=1,
            succeeded=3,
            failed=1,
            cancelled=1,
            groups_open=1,
            groups_settled=2,
            groups_trained=1,
            transitions=6,
            inexact=1,
            tokens=7,
        )
        assert await store.counts("other") == Counts(
            running=1, groups_open=1, transitions=1, tokens=1
        )
        trace = await store.trace("trained/0")
        first, second, other = trace.transitions
        assert (first.prompt, second.prompt) == (int32([1, 2]), int32([1, 2, 3, 4]))
        assert (second.completion, second.logprobs) == (int32([5, 6]), float32([-0.5, -0.5]))
        assert [message["content"] for message in second.messages] == ["q", "a", "more"]
        assert second.tools == first.tools != []
        assert other.role == "critic"
        assert [span.name for span in trace.spans] == ["tool"]
        assert trace.rollout.reward() == 1.0
        assert trace.rollout.result == {"x": 1}
        rows = {row.id: row for row in await store.rollouts("run")}
        assert rows["claimed/1"].failure.kind is ErrorKind.AGENT
        assert rows["claimed/2"].state is RolloutState.CANCELLED
        assert [step.metrics for step in await store.steps("run")] == [{"reward": 0.5}]
        assert (await store.policies("run"))["policy"].version == 1


async def test_work_goes_on_where_it_was(path: str, kit) -> None:
    async with open_store(path, clock=lambda: 1_700_000_011.0) as store:
        cursor = await store.cursor()
        state = await store.open_run("run", {})
        assert (state.epoch, state.step, state.checkpoint) == (2, 1, "step-0")
        running = (await store.trace("open/0")).attempt
        assert await store.heartbeat([running], lease=10) == [running]
        queued = {one.rollout.id: one for one in await store.claim(9, runner="r", lease=10)}
        assert sorted(queued) == ["eval/0", "open/1"]
        calls = [kit.call(queued["open/1"], [1, 2], [3], id=name) for name in ("new-0", "new-1")]
        assert await store.add_transitions(calls) == [True, True]
        await store.cancel(["open/0"])
        assert await store.finish([kit.good(queued["open/1"])]) == [True]
        groups = await store.claim_groups("run", 2, 9, timeout=0)
        assert [group.id for group in groups] == ["claimed", "open", "settled"]
        assert [call.exact for call in groups[0].rollouts[0].transitions] == [False]
        await store.commit_step(kit.step(1, [group.id for group in groups], epoch=2))
        counts = await store.counts("run")
        assert (counts.groups_open, counts.groups_settled, counts.groups_trained) == (0, 0, 4)
        assert (counts.queued, counts.running, counts.transitions) == (0, 1, 8)
        assert await store.cursor() > cursor


SEARCH = """
insert into candidates (run_id, id, step, parents, state, texts, reflection) values
    ('run', 'd', 1, '["c"]', 'chosen', '[{"component":"s","text":"b é ''\\u0000"}]', 'n'),
    ('run', 'c', 0, '[]', 'accepted', '[]', null);
insert into reflections (
    id, run_id, step, question, answer, prompt_tokens, completion_tokens, seconds
) values ('n', 'run', 1, 'why "é"?', 'so', 9, 2, 0.5);
"""


@pytest.mark.parametrize("schema", ["0018_owners"], indirect=True)
async def test_prompt_searches_become_documents(path: str) -> None:
    if path.startswith("postgres"):
        from agentrl.store.postgres.connection import PostgresServer

        with PostgresServer.parse(path).connect() as conn:
            conn.execute(SEARCH.encode())
    else:
        with contextlib.closing(Location(Path(path)).connect()) as file:
            file.executescript(SEARCH)
    async with open_store(path) as store:
        found = await store.documents("run", "candidate")
        assert list(found) == ["d", "c"]
        text = {"component": "s", "text": "b é '\0"}
        values = {"id": "d", "run": "run", "step": 1, "parents": ["c"], "state": "chosen"}
        assert found["d"] == {**values, "texts": [text], "reflection": "n"}
        assert (found["c"]["parents"], found["c"]["reflection"]) == ([], None)
        asked = {"id": "n", "run": "run", "step": 1, "question": 'why "é"?', "answer": "so"}
        spent = {"prompt_tokens": 9, "completion_tokens": 2, "seconds": 0.5}
        assert await store.documents("run", "reflection") == {"n": asked | spent}


def test_a_store_may_be_created_while_another_process_looks_at_it(tmp_path: Path) -> None:
    location = Location(tmp_path / "store.db")

    class Slow(sqlite3.Connection):
        def execute(self, *statement):  # type: ignore[no-untyped-def]
            found = super().execute(*statement).fetchall()
            migrations.prepare(location)
            return self.cursor().execute("values (?)", found[0])

    with contextlib.closing(sqlite3.connect(location.path, factory=Slow)) as conn:
        migrations._check_header(conn, location)  # type: ignore[arg-type]
