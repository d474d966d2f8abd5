"""Several processes on one store: they compete, wake each other, and are killed."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import sqlite3
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from agentrl.core.types import RolloutState
from agentrl.store import open_store
from agentrl.store import sqlite as sqlite_notify
from agentrl.store.sql import writer
from agentrl.store.sql.database import Feed
from tests.store.conftest import DATABASES

PEER = Path(__file__).with_name("peer.py")
Spawn = Callable[[str, str], "subprocess.Popen[str]"]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "store.db"


@pytest.fixture
def spawn(url: str) -> Iterator[Spawn]:
    with contextlib.ExitStack() as stack:

        def start(command: str, argument: str) -> subprocess.Popen[str]:
            process = subprocess.Popen(
                [sys.executable, str(PEER), url, command, argument],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
            )
            stack.enter_context(process)
            stack.callback(process.kill)
            return process

        yield start


def notify_of(url: str) -> ModuleType:
    """By which those who open a store are told; one over HTTP is in a file."""
    kind = "postgres.store" if url.startswith("postgresql") else "sqlite"
    return import_module(f"agentrl.store.{kind}")


async def test_processes_write_at_once_and_nothing_is_lost_or_done_twice(
    url: str, spawn: Spawn
) -> None:
    async with open_store(url) as store:
        await store.open_run("run", {})
        peers = {name: spawn("work", name) for name in ("a", "b", "c")}
        for peer in peers.values():
            assert await asyncio.to_thread(peer.wait) == 0
        rows = await store.rollouts("run")
        assert len(rows) == 3 * 20 * 4
        assert all(row.attempts <= 1 for row in rows)
        done = [row for row in rows if row.state is RolloutState.SUCCEEDED]
        assert (await store.counts("run")).succeeded == len(done) > 0
        assert {row.result for row in done} == set(peers)


async def test_another_process_wakes_a_waiter_at_once(
    url: str, spawn: Spawn, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(notify_of(url), "POLL_PAUSE", 60.0)  # the notification, not the slow look
    async with open_store(url) as store:
        await store.open_run("run", {})
        peer = spawn("enqueue", "g")
        assert peer.stdout.readline() == "ready\n"
        claim = asyncio.create_task(store.claim(1, runner="r", lease=9, timeout=60))
        wait = asyncio.create_task(store.wait(await store.cursor()))
        peer.stdin.write("go\n")
        peer.stdin.flush()
        async with asyncio.timeout(20):
            assert [attempt.rollout.id for attempt in await claim] == ["g/0"]
            assert await wait > 0


@pytest.mark.parametrize("url", DATABASES, indirect=True)
async def test_of_many_commits_others_are_told_at_once_and_of_the_last(
    url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    pause, told, steps = 0.4, list[int](), 60
    monkeypatch.setattr(writer, "NOTIFY_INTERVAL", pause)
    monkeypatch.setattr(notify_of(url), "POLL_PAUSE", 60.0)

    async with open_store(url) as one, open_store(url) as other, asyncio.timeout(30):
        session, started = one._writer._session, time.monotonic()

        def counted(notify: Callable[[int], None]) -> Callable[[int], None]:
            def count(topics: int) -> None:
                told.append(topics)
                notify(topics)

            return count

        async def follow() -> None:
            cursor = 0
            while cursor < steps + 1:
                cursor = await other.wait(cursor)

        monkeypatch.setattr(session, "commit", counted(session.commit))
        monkeypatch.setattr(session, "notify_others", counted(session.notify_others))
        following = asyncio.create_task(follow())
        await one.open_run("run", {})
        for step in range(steps):
            await one.log("run", step, {})
        await following
        assert len(told) >= steps
        assert sum(map(bool, told)) <= 3 + (time.monotonic() - started) / pause


@pytest.mark.parametrize("url", DATABASES, indirect=True)
async def test_an_error_while_listening_is_a_ring_and_not_the_end(
    url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    notify = notify_of(url)
    monkeypatch.setattr(notify, "POLL_PAUSE", 0.05)
    names = {"sqlite": ("ChangeNotifier", "_receive"), "postgresql": ("ChangeListener", "_heard")}
    kind, name = names[url.partition(":")[0]]
    kind = getattr(notify, kind)
    look, failed = getattr(kind, name), []

    def fail(*given: object) -> int:
        if len(failed) < 3:
            failed.append(given)
            raise RuntimeError("nobody foresaw this")
        return int(look(*given))

    async with open_store(url) as one, open_store(url) as other, asyncio.timeout(20):
        monkeypatch.setattr(kind, name, fail)
        for step in range(5):
            waiting = asyncio.create_task(one.wait(await one.cursor()))
            await other.open_run(f"run {step}", {})
            assert await waiting > step
        while len(failed) < 3:  # noqa: ASYNC110 - nothing announces it
            await asyncio.sleep(0.01)
        waiting = asyncio.create_task(one.wait(await one.cursor()))
        await other.open_run("last", {})
        assert await waiting


async def test_what_is_written_before_the_file_is_watched_is_heard_of(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delattr(socket, "AF_UNIX")
    monkeypatch.setattr(sqlite_notify, "POLL_PAUSE", 0.05)
    begin, version = threading.Event(), sqlite_notify._version

    def late(conn: sqlite3.Connection) -> int:
        begin.wait(20)
        return version(conn)

    looked, changed = asyncio.Event(), Feed.changed

    async def after_looking(feed: Feed, *arguments: Any) -> None:
        looked.set()
        await changed(feed, *arguments)

    monkeypatch.setattr(sqlite_notify, "_version", late)
    monkeypatch.setattr(Feed, "changed", after_looking)
    async with open_store(str(path)) as one, open_store(str(path)) as other:
        waiting = asyncio.create_task(one.wait(await one.cursor()))
        await looked.wait()
        await other.open_run("run", {})
        begin.set()
        async with asyncio.timeout(20):
            assert await waiting == 1


async def test_a_bell_that_cannot_be_taken_down_harms_nobody(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with open_store(str(path)) as store:
        with contextlib.closing(socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)) as dead:
            dead.bind(str(sqlite_notify.folder(path) / "dead"))

        def refuse(*_: object, **__: object) -> None:
            raise PermissionError("somebody else's")

        with monkeypatch.context() as patch:
            patch.setattr(Path, "unlink", refuse)
            await store.open_run("run", {})
            async with asyncio.timeout(10):
                await store.log("run", 0, {})
                await store.log("run", 1, {})
        assert len(await store.steps("run")) == 2


@pytest.mark.parametrize("made", ["open to all", "a link"])
async def test_a_folder_of_bells_that_others_may_enter_is_not_used(path: Path, made: str) -> None:
    await open_store(str(path)).close()
    bells, own = sqlite_notify.folder(path), path.parent / "own"
    own.mkdir(mode=0o700)
    if made == "a link":
        bells.symlink_to(own)
    else:
        bells.mkdir()
        bells.chmod(0o777)
    try:
        async with open_store(str(path)) as store:
            assert list(bells.iterdir()) == []
            await store.open_run("run", {})
    finally:
        bells.unlink() if made == "a link" else bells.rmdir()


async def test_whatever_was_acknowledged_survives_kill_9(url: str, spawn: Spawn) -> None:
    async with open_store(url) as store:
        await store.open_run("run", {})
        acknowledged = []
        for name in ("first", "second"):
            peer = spawn("load", name)
            acknowledged += [peer.stdout.readline().strip() for _ in range(300)]
            peer.kill()
            acknowledged += [line.strip() for line in peer.stdout if line.endswith("\n")]
            peer.wait()
        assert len(acknowledged) >= 600
        stored = {
            call.id
            for row in await store.rollouts("run")
            for call in (await store.trace(row.id)).transitions
        }
        assert stored >= set(acknowledged)
        assert (await store.counts("run")).transitions == len(stored)
    if url.startswith("sqlite"):
        conn = sqlite3.connect(url.removeprefix("sqlite:///"))
        assert conn.execute("pragma integrity_check").fetchall() == [("ok",)]
        conn.close()


async def test_every_call_has_its_images_after_kill_9(url: str, spawn: Spawn) -> None:
    async with open_store(url) as store:
        await store.open_run("run", {})
        peer = spawn("look", "first")
        assert peer.stdout is not None
        told = [peer.stdout.readline() for _ in range(100)]
        peer.kill()
        told += [line for line in peer.stdout if line.endswith("\n")]
        traces = [await store.trace(row.id) for row in await store.rollouts("run")]
        calls = [call for trace in traces if trace for call in trace.transitions]
        for call in calls:
            assert [*await store.images("run", call.images)] == [*call.images]
        assert {line.strip() for line in told} <= {call.id for call in calls}


@pytest.mark.parametrize("url", ["sqlite"], indirect=True)
async def test_the_bells_of_the_dead_are_taken_down(url: str, spawn: Spawn) -> None:
    async with open_store(url) as store:
        await store.open_run("run", {})
        peer = spawn("enqueue", "g")
        assert peer.stdout.readline() == "ready\n"
        peer.kill()
        peer.wait()
        bells = sqlite_notify.folder(Path(url.removeprefix("sqlite:///")))
        assert len(list(bells.iterdir())) == 2
        await store.log("run", 0, {})
        await store.counts("run")  # the notification comes before the next verb
        await store.log("run", 0, {})
        assert len(list(bells.iterdir())) == 1
