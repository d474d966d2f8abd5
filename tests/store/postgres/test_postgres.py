"""What only PostgreSQL can get wrong: addresses, locks, lost connections, order of the feed."""

from __future__ import annotations

import asyncio
import shutil
import sqlite3
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from hashlib import blake2b
from pathlib import Path
from types import SimpleNamespace

import psycopg
import pytest
from psycopg.pq import ExecStatus

from agentrl.core.errors import Invalid, NotFound, StoreError, Unavailable
from agentrl.core.types import RolloutState
from agentrl.store import open_store
from agentrl.store import sqlite as migrations
from agentrl.store.http.server import start_call
from agentrl.store.postgres import connection
from agentrl.store.postgres import connection as pgsession
from agentrl.store.postgres import store as notify
from agentrl.store.postgres import store as postgres_migrations
from agentrl.store.records import Item, Side
from agentrl.store.sql import database, datasets, runs, writer
from tests.store.conftest import QUERIES
from tests.store.postgres_server import pooler

POOLER = shutil.which("pgbouncer") or shutil.which("pgbouncer", path="/usr/sbin")
NOUNS = ("datasets", "maintenance", "traces", "feed", "requests", "rewind", "rollouts", "runs")


def refused(url: str, **options: object) -> str:
    with pytest.raises(StoreError) as caught:
        open_store(url, **options)
    return str(caught.value)


def sql(url: str, *statements: str) -> None:
    with psycopg.connect(url, autocommit=True) as conn:
        for statement in statements:
            conn.execute(statement.encode())


def database_of(url: str) -> str:
    return str(psycopg.conninfo.conninfo_to_dict(url)["dbname"])


@pytest.fixture
def url(postgres: Callable[[], str]) -> str:
    return postgres()


@pytest.fixture
def pooler_folder() -> Iterator[Path]:
    """Not in pytest's folder, which another user cannot enter."""
    with tempfile.TemporaryDirectory(prefix="agentrl-pooler-") as folder:
        yield Path(folder)


# -- opening ---------------------------------------------------------------------------------------


def test_wrong_addresses(server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection, "REFUSED_PATIENCE", 0.0)
    there = server.url("postgres")
    assert "is it running there?" in refused("postgresql://u:secret@127.0.0.1:1/x")
    assert "is it running there?" in refused("postgresql:///x?host=/nowhere&password=secret")
    assert "createdb" in refused(there.replace("/postgres?", "/missing?"))
    assert "check the user's name" in refused(there.replace("user=agentrl", "user=nobody"))
    assert "is not understood" in refused("postgresql://u:secret@host:port:1/x?what=1")


def test_a_wrong_password_is_a_sentence_without_it(server, url: str) -> None:
    sql(url, "create role locked login password 'right'")
    server.demand_password("locked")
    locked = url.replace("user=agentrl", "user=locked&password=")
    assert "check user and password" in refused(f"{locked}wrong-secret")
    with pytest.raises(Unavailable, match="permission denied"):
        open_store(f"{locked}right")


def test_a_server_that_is_restarted_is_waited_for_at_the_start(
    server, url: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connection, "REFUSED_PATIENCE", 60.0)
    server.kill()
    starting = threading.Thread(target=server.start)

    def started(seconds: float) -> None:
        if not starting.ident:
            assert "waiting for it" in caplog.text
            starting.start()
        time.sleep(seconds)

    clock = SimpleNamespace(monotonic=time.monotonic, sleep=started)
    monkeypatch.setattr(connection, "time", clock)
    store = open_store(url)
    starting.join()
    asyncio.run(store.close())
    assert caplog.text.count("waiting for it") == 1


@pytest.mark.parametrize(
    ("said", "seconds"),
    [
        ("FATAL:  the database system is starting up", 60),
        ("FATAL:  the database system is shutting down", 60),
        ("FATAL:  the database system is not yet accepting connections", 60),
        ("connection refused", 3),
        ('FATAL:  role "x" does not exist', 0),
    ],
)
def test_how_long_a_server_is_waited_for(
    monkeypatch: pytest.MonkeyPatch, said: str, seconds: int
) -> None:
    now = [0.0]

    def connect(*_: object, **__: object) -> None:
        raise psycopg.OperationalError(f"connection failed: {said}")

    monkeypatch.setattr(connection.psycopg, "connect", connect)
    clock = SimpleNamespace(
        monotonic=lambda: now[0], sleep=lambda pause: now.append(now.pop() + pause)
    )
    monkeypatch.setattr(connection, "time", clock)
    refused("postgresql:///x")
    assert now[0] == pytest.approx(seconds, abs=0.3)


def test_no_error_and_no_url_has_the_password(server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection, "REFUSED_PATIENCE", 0.0)
    for url in ("postgresql://u:secret@127.0.0.1:1/x", "postgresql://u@h:x/?password=secret"):
        assert "secret" not in refused(url)
    database = server.make()
    store = open_store(f"{database}&password=secret")
    assert store.url == database
    asyncio.run(store.close())


@pytest.mark.skipif(not POOLER, reason="needs pgbouncer")
@pytest.mark.parametrize("mode", ["transaction", "statement"])
@pytest.mark.parametrize("readonly", [False, True])
def test_a_pooler_that_lends_no_sessions_is_refused(
    url: str, pooler_folder: Path, mode: str, readonly: bool
) -> None:
    sql(url, f"alter database {database_of(url)} set lock_timeout = '7s'")
    with pooler(url, pooler_folder, mode) as pooled:
        assert "pool_mode = session" in refused(pooled, readonly=readonly)
        with psycopg.connect(pooled, autocommit=True) as conn:  # nothing was set for its others
            assert conn.execute("show lock_timeout").fetchone() == ("7s",)


@pytest.mark.skipif(not POOLER, reason="needs pgbouncer")
async def test_a_pooler_of_sessions_serves(url: str, pooler_folder: Path, kit) -> None:
    with pooler(url, pooler_folder, "session") as pooled:
        async with open_store(pooled) as one, open_store(pooled) as other:
            await one.open_run("run", {})
            await one.enqueue(kit.group("g", 3))
            assert len(await other.rollouts("run", group="g")) == 3


async def test_a_limit_of_time_of_the_role_does_not_apply(url: str, kit) -> None:
    """Hosted databases set it. Another's lock makes the statement wait for longer."""
    sql(
        url,
        *(
            f"alter role agentrl in database {database_of(url)} set {name}"
            for name in (
                "statement_timeout = 50",
                "lock_timeout = 50",
                "idle_in_transaction_session_timeout = 50",
                "default_transaction_isolation = 'serializable'",
            )
        ),
    )
    async with open_store(url) as store:
        await store.open_run("run", {})
        with psycopg.connect(url, autocommit=True) as other:
            other.execute("set statement_timeout = 0")
            other.execute("set idle_in_transaction_session_timeout = 0")
            other.execute("begin")
            other.execute("lock table rollouts in access exclusive mode")
            adding = asyncio.ensure_future(store.enqueue(kit.group("g", 2)))
            _, waiting = await asyncio.wait([adding], timeout=0.5)
            assert waiting
            other.execute("rollback")
        await adding
        assert len(await store.rollouts("run", group="g")) == 2


async def test_a_limit_of_time_in_the_url_is_named(url: str, kit) -> None:
    async with open_store(f"{url}&options=-cstatement_timeout%3D100") as store:
        await store.open_run("run", {})
        with psycopg.connect(url) as other:
            other.execute("lock table rollouts in access exclusive mode")
            with pytest.raises(Unavailable, match="options of the URL"):
                await store.enqueue(kit.group("g", 2))


def test_a_database_of_something_else(server) -> None:
    other = server.make()
    sql(other, "create table books (title text)")
    assert "not an agentrl store" in refused(other)
    sql(other, "create schema mine")
    asyncio.run(open_store(f"{other}&options=-csearch_path%3Dmine").close())


def test_a_missing_store_is_made_only_when_wanted(server) -> None:
    assert "There is no store" in refused(server.make(), create=False)


async def test_the_schema_is_applied_once_by_all_who_start_together(server) -> None:
    database = server.make()
    stores = await asyncio.gather(*(asyncio.to_thread(open_store, database) for _ in range(6)))
    for number, store in enumerate(stores):
        await store.open_run(str(number), {})
    assert len(await stores[0].runs()) == 6
    for store in stores:
        await store.close()


async def test_the_schema_is_that_of_sqlite(url: str, tmp_path) -> None:
    assert list(postgres_migrations.SCRIPTS) == list(migrations.SCRIPTS)
    async with open_store(str(tmp_path / "store.db")):
        pass
    with closing(sqlite3.connect(tmp_path / "store.db")) as conn:
        tables = conn.execute("select name from sqlite_master where type = 'table'").fetchall()
        twins = {
            (name, column[1])
            for (name,) in tables
            for column in conn.execute(f"pragma table_info({name})")
            if not name.startswith(("_", "sqlite_"))
        }
    with psycopg.connect(url) as conn:
        query = (
            "select table_name, column_name from information_schema.columns "
            "where table_schema = current_schema()"
        )
        found = {row for row in conn.execute(query) if not row[0].startswith("_")}
    assert found - twins == {("attempts", "seq"), ("spans", "seq")}  # there: `rowid`
    assert twins <= found


# -- statements ------------------------------------------------------------------------------------


def test_statements_are_translated() -> None:
    statement = database.Statement("select :a::text, '100%' where b = ? and c = :a")
    statement.noun, statement.name = "none", "none"
    assert statement.postgres == "select %(a)s::text, '100%%' where b = %s and c = %(a)s"
    listed = database.Statement("a in (select value from json_each(:a)) order by +b, 1 + 1, rowid")
    ids = "array(select json_array_elements_text(%(a)s::json))"
    assert listed.postgres == f"a = any ({ids}) order by b, 1 + 1, seq"
    sizes = database.Statement("length(cast(a as blob)) + length(b) > instr(c, ?)")
    assert sizes.postgres == "octet_length(a) + length(b) > strpos(c, %s)"


def test_every_override_has_a_statement_to_override() -> None:
    for noun in NOUNS:
        assert database._read(f"postgres/{noun}").keys() <= database.load_sql(noun).keys(), noun


def test_claims_do_not_slow_down_with_the_table(url: str) -> None:
    with psycopg.connect(url) as conn:
        conn.execute("set enable_seqscan = off")
        known = database.load_sql("traces")["check_known"].postgres.encode()
        rows = conn.execute(b"explain " + known, {"known": "[]", "now": None})
        plan = "\n".join(row[0] for row in rows)
        assert "using attempts_pkey " in plan, plan
        assert "transitions_by_" in plan, plan
        conn.execute("set enable_bitmapscan = off")
        for query, index in QUERIES:
            statement = database.load_sql("rollouts")[query].postgres
            places = ("0",) * statement.count("%s")
            names = {"n": 1, "run": "run"} if query.startswith("queued") else places
            rows = conn.execute(f"explain {statement}".encode(), names)
            plan = "\n".join(row[0] for row in rows)
            assert f"using {index} " in plan, (query, plan)
            assert not query.startswith("queued") or "Sort" not in plan, (query, plan)


# -- values ----------------------------------------------------------------------------------------


async def test_text_that_cannot_be_stored_is_refused_alone(url: str) -> None:
    async with open_store(url) as store:
        for epoch, name in enumerate(("nul \0", "\ud800"), start=1):
            bad, good = await asyncio.gather(
                store.open_run(name, {}), store.open_run("good", {}), return_exceptions=True
            )
            assert isinstance(bad, Invalid), (name, bad)
            assert good.epoch == epoch
        assert await store.runs() == ["good"]


# -- locks -----------------------------------------------------------------------------------------


async def test_leases_are_judged_by_the_clock_of_the_server(url: str, kit) -> None:
    """It is an hour ahead of this machine here, so that whose clock it was can be told."""
    sql(
        url,
        "create function clock_timestamp() returns timestamptz language sql as "
        "$$ select pg_catalog.clock_timestamp() + interval '1 hour' $$",
    )
    ahead = f"{url}&options=-csearch_path%3Dpublic,pg_catalog"
    async with open_store(ahead) as store:
        await store.open_run("run", {})
        await store.enqueue(kit.group("a", 1))
        (attempt,) = await store.claim(1, runner="r", lease=100)
        assert 3600 < attempt.lease_until - time.time() <= 3700
        assert await store.heartbeat([attempt.id], lease=200) == [attempt.id]
        assert await store.finish([kit.good(attempt)]) == [True]
        await store.enqueue(kit.group("b", 1))
        await store.claim(1, runner="r", lease=0.3)
        async with asyncio.timeout(10):  # it waits for what is left by that clock
            (again,) = await store.claim(1, runner="s", lease=9, timeout=20)
        assert again.fence == 2


async def test_a_deadlock_is_resolved_and_nobody_hears_of_it(url: str) -> None:
    async with open_store(url) as one, open_store(url) as other:
        await one.open_run("a", {})
        await one.open_run("b", {})
        met, tries = threading.Barrier(2), []

        def lock(first: str, then: str):
            def verb(tx):
                tries.append(first)
                query = "select 1 from runs where id = %s for update"
                tx.conn.execute(query, (first,)).fetchall()
                if tries.count(first) == 1:
                    met.wait(20)
                tx.conn.execute(query, (then,))
                return first

            return verb

        done = asyncio.gather(one._writer.post(lock("a", "b")), other._writer.post(lock("b", "a")))
        assert await done == ["a", "b"]
        assert len(tries) > 2


async def test_one_epoch_commits_a_step_once_from_two_processes(url: str, kit, opener) -> None:
    one, other = opener(), opener()
    await one.open_run("run", {})
    steps = [kit.step(0, [], checkpoint=name) for name in ("x", "y")]
    done = await asyncio.gather(
        one.commit_step(steps[0]), other.commit_step(steps[1]), return_exceptions=True
    )
    assert sum(isinstance(result, StoreError) for result in done) == 1
    assert (await one.run("run")).step == 1


async def test_an_item_is_added_before_its_version_is_complete(opener) -> None:
    one, other = opener(), opener()
    version = await one.draft_dataset("pairs", {})
    side = Side(digest="side", own=[])
    item = Item(position=0, kind="label", chosen="side", label=1.0)
    added, done = asyncio.Event(), threading.Event()
    loop = asyncio.get_running_loop()

    def add(tx: writer.Transaction) -> None:
        datasets.add_items(tx, "pairs", version, [item], [side])
        loop.call_soon_threadsafe(added.set)
        done.wait(0.5)  # the other would be done by then, if it did not wait

    adding = asyncio.ensure_future(one._writer.post(add))
    await added.wait()
    completing = asyncio.ensure_future(other.commit_dataset("pairs", version))
    completing.add_done_callback(lambda _: done.set())
    await adding
    assert (await completing).items == 1
    ids = "".join(each.id for each in await one.items("pairs", version))
    assert (await completing).digest == blake2b(ids.encode(), digest_size=16).hexdigest()


async def test_claims_with_one_id_are_one_claim(kit, opener) -> None:
    stores = [opener() for _ in range(4)]
    await stores[0].open_run("run", {})
    await stores[0].enqueue(kit.group("a", 20))
    claims = [store.claim(3, runner="r", lease=60, claim_id="c") for store in stores]
    found = await asyncio.gather(*claims)
    assert len({attempt.id for attempts in found for attempt in attempts}) == 3
    assert all(len(attempts) == 3 for attempts in found)


async def test_a_request_that_reaches_two_servers_is_executed_once(kit, opener) -> None:
    stores = [opener(), opener()]
    await stores[0].open_run("run", {})
    for number in range(20):
        request = runs.IdempotentCall(f"enqueue {number}", "digest")
        group = kit.group(str(number), 2)
        refused = [asyncio.ensure_future(store.log("nobody", 0, {})) for store in stores]
        both = [start_call(request, store.enqueue(group)) for store in stores]
        assert await asyncio.gather(*both) == [2, 2]  # though each was run a second time, alone
        for error in await asyncio.gather(*refused, return_exceptions=True):
            assert isinstance(error, NotFound)
    assert await stores[1].enqueue(group) == 0


async def test_a_follower_misses_no_event(url: str, kit, opener) -> None:
    stores = [opener() for _ in range(4)]
    await stores[0].open_run("run", {})
    seen, done = [0], threading.Event()

    def follow() -> None:
        with psycopg.connect(url, autocommit=True) as conn:
            last = False
            while not last:
                last = done.is_set()
                query = "select seq from events where seq > %s order by seq"
                seen.extend(row[0] for row in conn.execute(query, (seen[-1],)))

    async def write(name: str, store) -> None:
        for number in range(40):
            await store.enqueue(kit.group(f"{name}-{number}", 2))

    following = asyncio.create_task(asyncio.to_thread(follow))
    await asyncio.gather(*(write(str(i), store) for i, store in enumerate(stores)))
    done.set()
    await following
    with psycopg.connect(url) as conn:
        assert seen[1:] == [row[0] for row in conn.execute("select seq from events order by seq")]


async def test_a_notice_of_somebody_else_is_no_ring(url: str, monkeypatch) -> None:
    async with open_store(url) as one, open_store(url) as other, asyncio.timeout(20):
        monkeypatch.setattr(notify, "POLL_PAUSE", 60.0)
        waiting = asyncio.create_task(one.wait(await one.cursor()))
        sql(url, "notify agentrl, 'hello'", "notify agentrl")
        await other.open_run("run", {})
        assert await waiting == 1


@pytest.mark.parametrize("read", [True, False])
async def test_an_error_of_a_statement_is_that_of_its_verb(url: str, read: bool) -> None:
    """Also if nobody waits for the statement."""

    def fail(tx) -> None:
        found = tx.conn.execute("select 1 / %s", (0,))
        if read:
            found.fetchall()

    async with open_store(url) as store:
        await store.open_run("run", {})
        for step in (0, 2):
            good, bad, better = await asyncio.gather(
                store.log("run", step, {"a": 1.0}),
                store._writer.post(fail),
                store.log("run", step + 1, {"a": 1.0}),
                return_exceptions=True,
            )
            assert (good, better) == (None, None)
            assert isinstance(bad, Invalid)
        assert [row.step for row in await store.steps("run")] == [0, 1, 2, 3]


def test_a_row_and_several_are_the_same_statement() -> None:
    one, names = database.numbered("insert into t (a, b) values (%(a)s, f(%(b)s, %(a)s)) -- x")
    assert (one, names) == ("insert into t (a, b) values ($1, f($2, $1)) -- x", ("a", "b"))
    two = "insert into t (a, b) values ($1, f($2, $1)), ($3, f($4, $3)) -- x"
    assert connection.of_several(one, 2) == two
    assert connection.of_several(one, 1) is None
    assert connection.of_several("update t set a = $1", 2) is None
    assert connection.of_several(f"{one} on conflict (a) do update set b = 1", 2) is None


# -- lost connections ------------------------------------------------------------------------------


@pytest.mark.parametrize("took_place", [True, False])
async def test_a_commit_that_broke_off_is_done_once(
    url: str, kit, monkeypatch: pytest.MonkeyPatch, took_place: bool
) -> None:
    async with open_store(url) as store:
        await store.open_run("run", {})
        broken = break_off_commit(store, monkeypatch, took_place=took_place)
        assert await store.enqueue(kit.group("a", 3)) == 3
        assert broken == ["commit"]
        assert (await store.counts("run")).queued == 3


@pytest.mark.parametrize("took_place", [True, False])
async def test_a_call_whose_commit_broke_off_is_added_once(
    url: str, kit, monkeypatch: pytest.MonkeyPatch, took_place: bool
) -> None:
    """Nothing was asked before the commit, so nobody knows the transaction's number."""
    async with open_store(url) as store:
        await store.open_run("run", {})
        await store.enqueue(kit.group("a", 1))
        (attempt,) = await store.claim(1, runner="r", lease=60)
        broken = break_off_commit(store, monkeypatch, took_place=took_place)
        assert await store.add_transitions([kit.call(attempt, [1], [2, 3])]) == [True]
        assert broken == ["commit"]
        counts = await store.counts("run")
        assert (counts.transitions, counts.tokens) == (1, 2)
        assert len((await store.trace("a/0")).transitions) == 1


def break_off_commit(store, monkeypatch: pytest.MonkeyPatch, *, took_place: bool) -> list[str]:
    """The next commit loses its connection, before or after it; what was broken is listed."""
    session = store._writer._session
    execute, broken = session.conn.execute, []

    def break_off(query, *rest):
        if query != "commit":
            return execute(query, *rest)
        broken.append(query)
        if took_place:
            execute(query)
            session.conn.sync()
        session.conn.raw.close()
        raise psycopg.OperationalError("the connection is lost")

    monkeypatch.setattr(session.conn, "execute", break_off)
    return broken


async def test_a_call_of_an_attempt_claimed_here_waits_once(url: str, kit, monkeypatch) -> None:
    """For its commit, however many calls there are before it."""
    monkeypatch.setattr(writer, "NOTIFY_INTERVAL", 0.0)  # others are told by the commit, not later
    monkeypatch.setattr(writer, "URGENT_INTERVAL", 0.0)
    async with open_store(url) as store:
        await store.open_run("run", {})
        await store.enqueue(kit.group("a", 2))
        one, two = await store.claim(2, runner="r", lease=60)
        waits, received = [], connection.Pipeline._received

        def count(self):
            if (result := received(self)).status == ExecStatus.PIPELINE_SYNC:
                waits.append(result)
            return result

        monkeypatch.setattr(connection.Pipeline, "_received", count)
        for n in range(1, 4):
            for attempt in (one, two):
                waits.clear()
                assert await store.add_transitions([kit.call(attempt, [0] * n, [1])]) == [True]
                assert len(waits) == 1


async def test_a_restart_of_the_server_is_only_a_delay(server, url: str, kit, opener) -> None:
    store, other = opener(), opener()
    await store.open_run("run", {})
    waiting = asyncio.create_task(other.claim(1, runner="w", lease=600, run="later", timeout=60))
    halfway = asyncio.Event()

    async def work(name: str) -> None:
        for number in range(30):
            group = f"{name}-{number}"
            assert await store.enqueue(kit.group(group, 2)) == 2
            for attempt in await store.claim(2, runner=name, lease=600, run="run"):
                call = kit.call(attempt, [1, 2], [3])
                assert await store.add_transitions([call]) == [True]
                assert await store.finish([kit.good(attempt)]) == [True]
            await store.counts("run")
            if number == 10:
                halfway.set()

    working = asyncio.gather(*(work(name) for name in "abcd"))
    await halfway.wait()
    await asyncio.to_thread(server.kill)
    await asyncio.to_thread(server.start)
    await working
    rows = await store.rollouts("run")
    assert len(rows) == 240
    assert all(row.state is RolloutState.SUCCEEDED for row in rows)
    assert all(row.attempts == 1 for row in rows)
    assert (await store.counts("run")).transitions == 240
    await store.open_run("later", {})
    await store.enqueue(kit.group("g", 1, run="later"))
    assert len(await waiting) == 1


async def test_what_was_answered_survives_the_death_of_the_server(server, url: str, kit) -> None:
    """Of which the last answer is some microseconds old."""
    async with open_store(url) as store:
        await store.open_run("run", {})
        for number in range(12):
            assert await store.enqueue(kit.group(f"g{number}", 2)) == 2
            if number % 4 == 3:
                await asyncio.to_thread(server.kill)
                await asyncio.to_thread(server.start)
                rows = await store.rollouts("run")
                assert len(rows) == 2 * (number + 1)
                assert (await store.counts("run")).queued == len(rows)


async def test_a_server_that_stays_away_is_an_error_in_the_end(
    url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with open_store(url) as store:
        await store.open_run("run", {})
        monkeypatch.setattr(pgsession, "PATIENCE", 0.3)

        def away() -> None:
            raise psycopg.OperationalError("connection refused")

        session = store._writer._session
        monkeypatch.setattr(type(session._server), "connect", lambda self: away())
        session.conn.raw.close()
        with pytest.raises(Unavailable, match="is it running there"):
            await store.log("run", 0, {})
        monkeypatch.undo()
        await store.log("run", 1, {"a": 1.0})
        assert [row.step for row in await store.steps("run")] == [1]
