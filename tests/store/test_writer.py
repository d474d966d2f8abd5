"""The writer's thread: whatever happens to it, nobody waits for ever."""

from __future__ import annotations

import asyncio
import threading

import pytest

from agentrl.core.errors import Unavailable
from agentrl.store import open_store
from agentrl.store.sql import writer
from tests.store.conftest import DATABASES

pytestmark = pytest.mark.parametrize("url", DATABASES, indirect=True)
SOON = 10.0  # seconds in which whatever is waited for must have happened


def broken(*_: object) -> None:
    raise PermissionError("nobody foresaw this")


async def test_what_nobody_foresaw_is_the_answer_to_every_verb(url, monkeypatch):
    async with open_store(url) as store, asyncio.timeout(SOON):
        await store.open_run("run", {})
        held, go = threading.Event(), threading.Event()

        def hold(tx):
            held.set()
            go.wait(SOON)

        first = asyncio.ensure_future(store._writer.post(hold))
        await asyncio.to_thread(held.wait, SOON)
        monkeypatch.setattr(store._writer._session, "begin", broken)
        waiting = [store._writer.post(lambda tx: None) for _ in range(3)]
        go.set()
        await first
        for call in waiting:
            with pytest.raises(Unavailable, match="nobody foresaw this"):
                await call
        with pytest.raises(Unavailable, match="open the store again"):
            await store.log("run", 0, {})
        assert await store.runs() == ["run"]
    async with open_store(url) as store, asyncio.timeout(SOON):  # nobody holds the lock
        await store.log("run", 0, {"a": 1.0})


async def test_a_ring_that_fails_hangs_nobody(url, monkeypatch):
    async with open_store(url) as store, asyncio.timeout(SOON):
        monkeypatch.setattr(store._writer, "_notify", broken)
        assert (await store.open_run("run", {})).epoch == 1  # committed all the same
        with pytest.raises(Unavailable, match="open the store again"):
            await store.log("run", 0, {})


async def test_a_verb_posted_while_the_store_closes_is_answered(url, monkeypatch):
    """Its caller saw an open store, and is held up before it puts the verb."""
    store = open_store(url)
    jobs = store._writer._jobs
    met, closing = threading.Event(), threading.Event()

    class Slow:
        get, get_nowait, empty = jobs.get, jobs.get_nowait, jobs.empty

        def put(self, job):
            if job is None:
                closing.set()
            else:
                met.set()
                closing.wait(0.3)
            jobs.put(job)

    def close() -> None:
        met.wait(SOON)
        store._close()

    monkeypatch.setattr(store._writer, "_jobs", Slow())
    thread = threading.Thread(target=close)
    thread.start()
    async with asyncio.timeout(SOON):
        assert (await store.open_run("run", {})).epoch == 1
    thread.join()


@pytest.mark.parametrize("where", ["before", "inside"])
async def test_time_in_which_nobody_could_write_ends_no_lease(url, kit, clock, monkeypatch, where):
    monkeypatch.setattr(writer, "STALL", 0.1)
    async with open_store(url, clock=clock) as store, asyncio.timeout(SOON):
        await store.open_run("run", {})
        await store.enqueue(kit.group("a", 2))
        one, two = await store.claim(2, runner="r", lease=15)
        await store.finish([kit.good(two)])
        session = store._writer._session
        begin = session.begin

        def stall(*_: object) -> float:
            threading.Event().wait(0.2)
            clock.now += 60
            return begin() if where == "before" else 0.0

        if where == "before":
            monkeypatch.setattr(session, "begin", stall)
        else:
            await store._writer.post(stall)
        assert await store.claim(1, runner="s", lease=15) == []
        monkeypatch.setattr(session, "begin", begin)
        assert await store.heartbeat([one.id, two.id], lease=1) == [one.id]
        clock.now += writer.LEASE_GRACE + 1
        await store.log("run", 0, {})  # not stalled
        (again,) = await store.claim(1, runner="s", lease=15)
        assert (again.rollout.id, again.fence) == ("a/0", 2)
        clock.now += 16
        await store.vacuum()
        assert await store.heartbeat([one.id, again.id], lease=1) == [again.id]


async def test_a_verb_posted_before_the_store_closes_is_answered(url):
    store = open_store(url)
    posted = store._writer.post(lambda tx: "done")
    store._close()
    assert await posted == "done"


async def test_verbs_of_a_caller_are_executed_in_order(url):
    done = []
    async with open_store(url) as store, asyncio.timeout(SOON):
        calls = []
        for n in range(300):
            calls.append(store._writer.post(lambda tx, n=n: done.append(n)))
            for _ in range(n % 5):
                await asyncio.sleep(0)
        await asyncio.gather(*calls)
    assert done == list(range(300))


async def test_the_thread_waits_for_the_verbs_that_a_store_has_as_it_closes(url, monkeypatch):
    """It executes what was posted before the store closes, while that has not reached it yet."""
    store = open_store(url)
    jobs, thread = store._writer._jobs, store._writer._thread
    closing = threading.Event()

    class Slow:
        get, get_nowait, empty = jobs.get, jobs.get_nowait, jobs.empty

        def put(self, job):
            if store._writer._closed and not closing.is_set():
                closing.set()
                thread.join(0.3)
            jobs.put(job)

    monkeypatch.setattr(store._writer, "_jobs", Slow())
    async with asyncio.timeout(SOON):
        await store._writer.post(lambda tx: None)
        posted = store._writer.post(lambda tx: "done")
        store._close()
        assert await posted == "done"


async def test_the_verb_of_an_event_loop_that_ended_is_executed(url):
    done = []

    async def leave() -> None:
        store._writer.post(lambda tx: done.append(1))

    def end() -> None:
        loop = asyncio.new_event_loop()
        loop.run_until_complete(leave())
        loop.close()

    async with open_store(url) as store, asyncio.timeout(SOON):
        await asyncio.to_thread(end)
        await store._writer.post(lambda tx: None)
        assert done == [1]


async def test_a_transaction_that_cannot_begin_is_tried_once(url, monkeypatch):
    """On SQLite `begin` has already waited for the lock as long as anybody should."""
    async with open_store(url) as store, asyncio.timeout(SOON):
        await store.open_run("run", {})
        session, tries, ran = store._writer._session, [], []

        def locked(*_: object) -> None:
            tries.append(1)
            raise session.errors[0]("the file is locked")

        monkeypatch.setattr(session, "can_retry", lambda error, since: False)
        with monkeypatch.context() as patch:
            patch.setattr(session, "begin", locked)
            with pytest.raises(Unavailable):
                await store._writer.post(lambda tx: ran.append(1))
        assert (len(tries), ran) == (1, [])
        await store.log("run", 0, {})


async def test_a_verb_is_stored_though_its_caller_was_cancelled(url):
    async with open_store(url) as store, asyncio.timeout(SOON):
        held, go = threading.Event(), threading.Event()

        def hold(tx):
            held.set()
            go.wait(SOON)

        store._writer.post(hold)
        await asyncio.to_thread(held.wait, SOON)
        cancelled = asyncio.create_task(store.open_run("run", {}))
        await asyncio.sleep(0)
        cancelled.cancel()
        last = store._writer.post(lambda tx: None)
        go.set()
        with pytest.raises(asyncio.CancelledError):
            await cancelled
        await last
        assert await store.runs() == ["run"]
