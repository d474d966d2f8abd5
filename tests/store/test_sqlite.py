"""The SQLite file itself: addresses, damage, schema, full disks, and what imports cost."""

from __future__ import annotations

import asyncio
import contextlib
import shutil
import sqlite3
import subprocess
import sys
import threading
from pathlib import Path
from types import SimpleNamespace

import pytest

from agentrl.core.errors import Invalid, StoreError, Unavailable
from agentrl.store import open_store, sqlite
from agentrl.store.sql import traces, writer
from agentrl.store.sql.database import QUEUE
from agentrl.store.sqlite import Location, folder
from tests.store.conftest import QUERIES


def refused(url: object, **options: object) -> str:
    """The one sentence with which a URL is refused."""
    with pytest.raises(StoreError) as caught:
        open_store(str(url), **options)
    message = str(caught.value)
    assert "\n" not in message
    assert message.endswith(".")
    return message


def test_addresses(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    absolute = Location(tmp_path / "a b.db")
    assert Location.parse("sqlite:///a b.db") == absolute
    assert Location.parse("a b.db") == absolute
    assert Location.parse(f"sqlite:///{tmp_path}/a b.db") == absolute
    assert Location.parse(absolute.url) == absolute
    full = Location.parse("sqlite:///x.db?synchronous=full")
    assert full == Location(tmp_path / "x.db", "full")
    assert Location.parse(full.url) == full


@pytest.mark.parametrize(
    ("url", "why"),
    [
        ("mysql://host/db", "is invalid: write it as sqlite:///path"),
        ("sqlite://", "does not name a file"),
        ("sqlite://host/x.db", "does not name a file"),
        (":memory:", "does not name a file"),
        ("", "does not name a file"),
        ("sqlite:///x.db?sync=full", "unknown option"),
        ("sqlite:///x.db?synchronous=off", "unknown option"),
    ],
)
def test_wrong_addresses(url: str, why: str) -> None:
    assert why in refused(url)


def test_a_file_that_is_no_database(tmp_path: Path) -> None:
    path = tmp_path / "notes.txt"
    path.write_text("dear diary, " * 100)
    assert "not an SQLite database" in refused(path)
    assert path.read_text().startswith("dear diary")


def test_a_database_of_something_else(tmp_path: Path) -> None:
    path = tmp_path / "other.db"
    conn = sqlite3.connect(path)
    conn.execute("create table books (title)")
    conn.close()
    assert "not an agentrl store" in refused(path)


async def test_a_damaged_store(tmp_path: Path) -> None:
    path = tmp_path / "store.db"
    await open_store(str(path)).close()
    content = bytearray(path.read_bytes())
    content[4096:] = b"\xff" * (len(content) - 4096)
    path.write_bytes(content)
    with pytest.raises(StoreError, match="damaged"):
        async with open_store(str(path)) as store:
            await store.open_run("run", {})


def test_an_impossible_folder(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    assert "choose a writable one" in refused(tmp_path / "file" / "store.db")
    assert "is a folder: name the file of a store" in refused(tmp_path)


def test_a_missing_store_is_made_only_when_wanted(tmp_path: Path) -> None:
    path = tmp_path / "new" / "store.db"
    for options in ({"create": False}, {"readonly": True}):
        assert "no store at" in refused(path, **options)
    assert not path.parent.exists()
    asyncio.run(open_store(str(path)).close())
    asyncio.run(open_store(str(path), create=False).close())


async def test_sqlite_utils_agrees_that_nothing_is_pending(tmp_path: Path) -> None:
    from sqlite_utils import Database

    await open_store(str(tmp_path / "store.db")).close()
    conn = sqlite3.connect(tmp_path / "store.db")
    assert sqlite.migrations().pending(Database(conn)) == []
    assert conn.execute("pragma journal_mode").fetchone() == ("wal",)
    conn.close()


async def test_a_full_disk_fails_the_write_and_nothing_else(tmp_path: Path, kit) -> None:
    async with open_store(str(tmp_path / "store.db")) as store:
        await store.open_run("run", {})

        def limit(tx):
            (pages,) = tx.conn.execute("pragma page_count").fetchone()
            tx.conn.execute(f"pragma max_page_count = {pages + 1}")

        await store._writer.post(limit)
        big = store.open_run("big", {"text": "x" * 100_000})
        small = store.log("run", 0, {"a": 1.0})
        failed, _ = await asyncio.gather(big, small, return_exceptions=True)
        assert isinstance(failed, Unavailable)
        assert f"Store {tmp_path / 'store.db'}: the disk is full; free some space" in str(failed)
        await store._writer.post(lambda tx: tx.conn.execute("pragma max_page_count = 100000"))
        await store.log("run", 1, {"a": 2.0})
        assert await store.runs() == ["run"]


async def test_calls_that_meet_a_full_disk_are_written_wholly_when_repeated(
    tmp_path: Path, kit
) -> None:
    async with open_store(str(tmp_path / "store.db")) as store:
        await store.open_run("run", {})
        await store.enqueue(kit.group("a", 2))
        one, two = await store.claim(2, runner="r", lease=60)
        before = await store.counts("run"), await store.cursor()

        def limit(tx):
            (pages,) = tx.conn.execute("pragma page_count").fetchone()
            tx.conn.execute(f"pragma max_page_count = {pages + 2}")

        await store._writer.post(limit)
        calls = [kit.call(one, [i] * 500, [i] * 500) for i in range(50)]
        with pytest.raises(Unavailable, match="disk is full"):
            await store.add_transitions(calls)
        outcome = kit.good(two, result="x" * 100_000)
        with pytest.raises(Unavailable, match="disk is full"):
            await store.finish([outcome])
        assert (await store.counts("run"), await store.cursor()) == before
        assert (await store.trace("a/0")).transitions == []
        assert (await store.trace("a/1")).rollout.rewards == []

        await store._writer.post(lambda tx: tx.conn.execute("pragma max_page_count = 100000"))
        assert await store.add_transitions(calls) == [True] * 50
        assert await store.finish([outcome]) == [True]
        assert (await store.trace("a/0")).transitions == calls


async def test_a_store_damaged_in_the_middle(tmp_path: Path, kit) -> None:
    path = tmp_path / "store.db"
    async with open_store(str(path)) as store:
        await store.open_run("run", {})
        await store.enqueue(kit.group("a", 500, task={"text": "x" * 1000}))
    content = bytearray(path.read_bytes())
    half = len(content) // 2
    content[half:] = b"\xff" * (len(content) - half)
    path.write_bytes(content)
    async with open_store(str(path)) as store:
        with pytest.raises(Unavailable, match=r"store.db: the file is damaged; restore a copy"):
            await store.rollouts("run")
        with pytest.raises(Unavailable, match="damaged"):
            await store.claim(500, runner="r", lease=9)


async def test_a_refused_verb_harms_no_other_of_its_group(tmp_path: Path, kit) -> None:
    async with open_store(str(tmp_path / "store.db")) as store:
        await store.open_run("run", {})
        verbs = [
            store.enqueue(kit.group("a", 2)),
            store.enqueue([*kit.group("b", 1), *kit.group("c", 1, run="none")]),
            store.enqueue(kit.group("d", 2)),
        ]
        added = await asyncio.gather(*verbs, return_exceptions=True)
        assert added[::2] == [2, 2]
        assert isinstance(added[1], StoreError)
        ids = [row.id for row in await store.rollouts("run")]
        assert ids == ["a/0", "a/1", "d/0", "d/1"]


async def test_an_error_that_ended_the_snapshot_is_the_one_that_is_met(tmp_path: Path) -> None:
    async with open_store(str(tmp_path / "store.db")) as store:
        await store.open_run("run", {})

        def read(conn):
            conn.execute("rollback")  # as SQLite does when the disk fails
            raise sqlite3.OperationalError("disk I/O error")

        with pytest.raises(Unavailable, match="disk I/O error"):
            await store._readers.read(read)
        assert await store.runs() == ["run"]


async def test_one_store_serves_several_loops(tmp_path: Path, kit) -> None:
    async with open_store(str(tmp_path / "store.db")) as store:
        await store.open_run("run", {})
        waiting = asyncio.create_task(store.claim(1, runner="here", lease=10, timeout=10))
        await asyncio.to_thread(asyncio.run, store.enqueue(kit.group("a", 1)))
        assert [attempt.rollout.id for attempt in await waiting] == ["a/0"]


async def test_the_log_is_copied_back_while_the_store_is_open(
    tmp_path: Path, kit, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sqlite, "CHECKPOINT_ROWS", 1)
    path = tmp_path / "store.db"
    async with open_store(str(path)) as store:
        await store.open_run("run", {})
        size = path.stat().st_size
        await store.enqueue(kit.group("a", 100, task={"text": "x" * 1000}))
        async with asyncio.timeout(20):
            while path.stat().st_size < size + 100_000:  # noqa: ASYNC110 - nothing announces it
                await asyncio.sleep(0.01)


def test_nothing_is_left_behind(tmp_path: Path) -> None:
    path = tmp_path / "store.db"
    store = open_store(str(path))
    bells = folder(path)
    assert len(list(bells.iterdir())) == 1
    asyncio.run(store.close())
    assert not bells.exists()
    assert [file.name for file in tmp_path.iterdir()] == ["store.db"]


async def test_claims_do_not_slow_down_with_the_table(tmp_path: Path) -> None:
    from agentrl.store.sql.rollouts import SQL

    await open_store(str(tmp_path / "store.db")).close()
    with contextlib.closing(sqlite3.connect(tmp_path / "store.db")) as conn:
        for query, index in (*QUERIES, ("group_of", "sqlite_autoindex_rollouts_1")):
            places = ("x",) * SQL[query].count("?")
            names = {"n": 1, "run": "run"} if query.startswith("queued") else places
            plan = conn.execute(f"explain query plan {SQL[query]}", names).fetchall()
            assert any(index in step[3].split() for step in plan), (query, plan)
            assert not any("B-TREE FOR ORDER BY" in step[3] for step in plan[:-1]), (query, plan)


def test_importing_the_package_is_light() -> None:
    code = (
        "import sys; import agentrl.store; "
        "heavy = {'sqlite_utils', 'torch', 'aiohttp', 'sqlite3', 'httpx'}; "
        "sys.exit(', '.join(sorted(heavy & set(sys.modules))) or 0)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_a_new_store_waits_for_who_reads_its_file(tmp_path: Path) -> None:
    reader = sqlite3.connect(path := tmp_path / "store.db", isolation_level=None)
    reader.executescript("create table t (x); drop table t; begin; select * from sqlite_master")
    opening = threading.Thread(target=sqlite.prepare, args=[Location.parse(str(path))])
    opening.start()
    opening.join(0.2)
    assert opening.is_alive()
    reader.execute("commit")
    opening.join(30)
    reader.close()
    assert path.read_bytes()[18:20] == b"\2\2"  # of its header: in use with a write-ahead log


@pytest.mark.parametrize("fate", ["deleted", "replaced"])
async def test_a_file_that_goes_away_in_use_ends_every_verb_with_a_sentence(
    tmp_path: Path, fate: str
) -> None:
    path = tmp_path / "run" / "store.db"
    async with open_store(str(path)) as store:
        await store.open_run("run", {})
        waits = [
            asyncio.create_task(store.claim(1, runner="r", lease=1.0, run="run", timeout=60.0)),
            asyncio.create_task(store.wait(2**40, timeout=60.0)),
        ]
        await asyncio.sleep(0)
        while path.parent.exists():  # a connection just opened may add its files meanwhile
            shutil.rmtree(path.parent, ignore_errors=True)
        if fate == "replaced":
            async with open_store(str(path)) as other:
                await other.open_run("other", {})
        for verb in (*waits, store.open_run("run", {}), store.run("run")):
            with pytest.raises(Unavailable, match="was deleted, moved or replaced while"):
                await asyncio.wait_for(verb, 10)
    assert path.exists() is (fate == "replaced")  # nobody made an empty one in its place


async def test_no_verb_runs_on_an_event_loop_which_goes_on_while_others_write(
    tmp_path: Path,
) -> None:
    threads: list[threading.Thread] = []

    def note(tx) -> None:
        threads.append(threading.current_thread())

    async with open_store(str(tmp_path / "a.db")) as store, asyncio.timeout(10):
        post = store._writer.post
        await asyncio.gather(post(note), post(note))
        with contextlib.closing(sqlite3.connect(tmp_path / "a.db", isolation_level=None)) as other:
            other.execute("begin immediate")
            waiting = asyncio.ensure_future(post(note))
            for _ in range(100):  # the event loop goes on
                await asyncio.sleep(0)
            assert not waiting.done()
            other.execute("commit")
        await waiting
        assert threads == [store._writer._thread] * 3


async def test_a_long_call_is_written_in_the_thread(
    tmp_path: Path, kit, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It would hold up its event loop for milliseconds."""
    threads: list[threading.Thread] = []
    add = traces.add_transitions

    def note(*args):
        threads.append(threading.current_thread())
        return add(*args)

    monkeypatch.setattr(traces, "add_transitions", note)
    async with open_store(str(tmp_path / "a.db")) as store, asyncio.timeout(10):
        await store.open_run("run", {})
        await store.enqueue(kit.group("g"))
        (attempt,) = await store.claim(1, runner="w", run="run", lease=60)
        for length in [100] * 20 + [1_000_000] * 5:
            message = {"role": "user", "content": "x" * length}
            await store.add_transitions([kit.call(attempt, [1], [2], messages=[message])])
    assert len(threads) == 25
    assert threading.current_thread() not in threads


async def test_what_nobody_foresaw_at_a_commit_is_the_answer_to_every_verb(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with open_store(str(tmp_path / "a.db")) as store, asyncio.timeout(10):

        def broken(*_: object) -> None:
            raise PermissionError("nobody foresaw this")

        monkeypatch.setattr(store._writer._session, "commit", broken)
        for call in [store._writer.post(lambda tx: None) for _ in range(3)]:
            with pytest.raises(Unavailable, match="nobody foresaw this"):
                await call
        with pytest.raises(Unavailable, match="open the store again"):
            await store.log("run", 0, {})
    async with (
        open_store(str(tmp_path / "a.db")) as store,
        asyncio.timeout(10),
    ):  # nobody holds the lock
        assert (await store.open_run("run", {})).epoch == 1


async def test_a_refused_verb_does_not_hold_up_its_event_loop(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another process takes the lock before the verbs are run again, each alone."""

    def refused(tx) -> None:
        raise Invalid("no")

    async with open_store(str(tmp_path / "a.db")) as store, asyncio.timeout(10):
        elsewhere = {"isolation_level": None, "check_same_thread": False}
        with contextlib.closing(sqlite3.connect(tmp_path / "a.db", **elsewhere)) as other:
            session = store._writer._session
            rollback, lost = session.rollback, threading.Event()

            def lose_the_lock() -> None:
                rollback()
                if not lost.is_set():
                    other.execute("begin immediate")
                    lost.set()

            monkeypatch.setattr(sqlite, "LOCK_PATIENCE", 5.0)
            monkeypatch.setattr(session, "rollback", lose_the_lock)
            calls = [asyncio.ensure_future(store._writer.post(v)) for v in (refused, lambda _: 1)]
            await asyncio.to_thread(lost.wait, 10)
            for _ in range(100):  # the event loop goes on
                await asyncio.sleep(0)
            assert not any(call.done() for call in calls)
            other.execute("commit")
            answers = await asyncio.gather(*calls, return_exceptions=True)
        assert isinstance(answers[0], Invalid)
        assert answers[1] == 1


async def test_a_verb_that_makes_a_rollout_claimable_hastens_the_notification(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(writer, "URGENT_INTERVAL", 0.2)
    monkeypatch.setattr(writer, "NOTIFY_INTERVAL", 100.0)
    async with open_store(str(tmp_path / "a.db")) as store, asyncio.timeout(10):
        told, loop, post = asyncio.Event(), asyncio.get_running_loop(), store._writer.post
        jobs, patient = store._writer._jobs, threading.Event()

        class Watched:
            put, get_nowait, empty = jobs.put, jobs.get_nowait, jobs.empty

            def get(self, timeout: float | None) -> object:
                if timeout is not None:
                    patient.set()
                return jobs.get(timeout=timeout)

        def notify_others(topics: int) -> None:
            if topics & QUEUE:
                loop.call_soon_threadsafe(told.set)

        monkeypatch.setattr(store._writer, "_jobs", Watched())
        monkeypatch.setattr(store._writer._session, "_notify_others", notify_others)
        for topics in (0, 0, QUEUE):  # the first is sent at once
            await post(lambda tx, topics=topics: tx.add_event("run", "rollout", "a", topics))
            if topics == 0 and store._writer._notices.owed:
                await asyncio.to_thread(patient.wait, 10)
        await told.wait()


INTERRUPTED = {  # an event loop as it posts, or the thread: before or after this call
    "before it posts": ("_jobs", "put", "before"),
    "once it has posted": ("_jobs", "put", "after"),
    "as the verb begins": ("_session", "begin", "after"),
    "as the verb ends": ("_session", "commit", "before"),
    "once it is stored": ("_session", "commit", "after"),
}


@pytest.mark.parametrize("where", INTERRUPTED)
def test_an_interrupt_leaves_no_verb_unanswered_and_no_lock(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    store = open_store(str(tmp_path / "a.db"))
    answers: dict[str, object] = {}
    owner, name, when = INTERRUPTED[where]
    jobs = store._writer._jobs
    store._writer._jobs = SimpleNamespace(get=jobs.get, get_nowait=jobs.get_nowait, put=jobs.put)

    async def added(id: str) -> None:
        await store._writer.post(lambda tx: tx.add_event("run", "kind", id))

    async def post(id: str) -> None:
        (answers[id],) = await asyncio.gather(added(id), return_exceptions=True)

    async def both(*ids: str) -> None:
        async with asyncio.timeout(10):
            await asyncio.gather(*map(post, ids))

    with asyncio.Runner() as runner:
        holder = getattr(store._writer, owner)
        call = getattr(holder, name)

        def interrupted(*args: object, **more: object) -> object:
            monkeypatch.undo()
            if when == "after":
                call(*args, **more)
            raise KeyboardInterrupt

        monkeypatch.setattr(holder, name, interrupted)
        if owner == "_jobs":  # the interrupt is the error of the first caller
            with pytest.raises(KeyboardInterrupt):
                runner.run(both("a", "b"))
            with contextlib.suppress(KeyboardInterrupt):
                runner.run(asyncio.sleep(0))
            runner.run(both("c", "d"))
            assert answers["c"] is answers["d"] is None
        else:
            runner.run(both("a", "b"))
            with pytest.raises(Unavailable, match="open the store again"):
                runner.run(added("c"))
            assert isinstance(answers["a"], Unavailable)
            assert isinstance(answers["b"], Unavailable)
        with contextlib.closing(sqlite3.connect(tmp_path / "a.db", timeout=5)) as other:
            other.execute("begin immediate")  # nobody holds the lock
        runner.run(store.close())
