"""The client where the contract does not look: other loops, lost answers, dead servers, keys."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import ssl
import subprocess
import sys
import threading
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import httpx
import msgspec
import psutil
import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer
from msgspec import structs

from agentrl.core.errors import Forbidden, Invalid, NotFound, StoreError, Unavailable
from agentrl.core.types import ErrorKind, Failure, NewRollout, Outcome, RolloutState
from agentrl.store import open_store
from agentrl.store.http.client import HttpStore, call
from agentrl.store.urls import KEY_VARIABLE
from tests.factories import refused

KEYS = "admin:admin-secret\nrunner:runner-secret"


@pytest.fixture
def address(serving, tmp_path: Path) -> Iterator[str]:
    with serving(f"sqlite:///{tmp_path / 'store.db'}") as url:
        yield url


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        return int(probe.getsockname()[1])


@contextlib.contextmanager
def server(url: Path | str, port: int) -> Iterator[subprocess.Popen[str]]:
    command = [sys.executable, "-m", "agentrl", "store", "serve", str(url)]
    with subprocess.Popen(
        [*command, "--port", str(port)], stdout=subprocess.PIPE, text=True
    ) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == f"Serving at http://127.0.0.1:{port}\n"
            yield process
        finally:
            process.kill()


# -- addresses and keys ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    "url",
    [
        "http://",
        "http://secret@host:99999",
        "http://secret@host/?patience=soon",
        "http://secret@host/?patience=-1",
        "http://host/?key=secret&unknown=1",
        "http://secret@host/#x",
        "http://user:secret@host/",
        "http://user:secret/more@host/",
    ],
)
def test_a_wrong_address_is_refused_without_saying_the_key(url):
    with pytest.raises(StoreError, match="URL") as caught:
        open_store(url)
    assert "secret" not in str(caught.value)


async def test_keys_come_by_url_or_environment_and_stay_hidden(serving, tmp_path, monkeypatch):
    with serving(f"sqlite:///{tmp_path / 'store.db'}", KEYS) as address:
        host = address.removeprefix("http://")
        for url in (f"http://runner-secret@{host}", f"{address}?key=runner-secret"):
            async with open_store(url) as store:
                assert await store.cursor() == 0
                with pytest.raises(Forbidden, match="runs needs a key of scope reader or admin"):
                    await store.runs()
                assert store.url == address
        async with open_store(address) as store:
            with pytest.raises(Forbidden, match="missing, unknown or expired"):
                await store.cursor()
        monkeypatch.setenv(KEY_VARIABLE, "admin-secret")
        async with open_store(address) as store:
            assert await store.runs() == []


async def test_a_trace_sends_every_message_and_token_once(address, kit):
    """Else forty turns of 4 kB would be sent as 3.5 MB."""
    async with open_store(address) as store:
        await store.open_run("run", {})
        await store.enqueue(kit.group("g", 1))
        (attempt,) = await store.claim(1, runner="r", lease=60)
        tokens, chat, sent = [], [], []
        for turn in range(40):
            chat = [*chat, {"role": "tool", "content": f"{turn}" * 2000}]
            tokens = [*tokens, *range(turn, turn + 500)]
            answer = {"role": "assistant", "content": f"{turn}"}
            tools = [{"name": "tool", "description": "x" * 2000}]
            sent.append(
                kit.call(attempt, tokens, [1, 2], messages=chat, answer=answer, tools=tools)
            )
            tokens, chat = [*tokens, 1, 2], [*chat, answer]
            await store.add_transitions(sent[-1:])
        trace = await store.trace("g/0")
        assert trace.transitions == sent
        body = msgspec.msgpack.encode({"rollout": "g/0"})
        headers = {"content-type": "application/msgpack"}
        async with httpx.AsyncClient(base_url=address) as client:
            answer = await client.post("/v1/trace", content=body, headers=headers)
            whole = await client.post("/v1/trace", json={"rollout": "g/0"})
        contents = sum(len(message["content"]) for message in chat)
        assert len(answer.content) < 1.2 * (contents + 4 * len(tokens)) < len(whole.content) / 10


async def test_what_is_no_store(address):
    async with open_store(f"{address}/elsewhere") as store:
        with pytest.raises(StoreError, match="There is no /elsewhere/v1/cursor"):
            await store.cursor()


@pytest.mark.parametrize("body", [b"<html>", b"\x81\xa1a\x01", b"\xc1", b""])
async def test_an_answer_that_is_no_stores(body):
    async def answer(_: web.Request) -> web.Response:
        return web.Response(body=body)

    app = web.Application()
    app.router.add_post("/v1/{verb}", answer)
    async with (
        TestServer(app, host="127.0.0.1") as other,
        HttpStore(f"http://127.0.0.1:{other.port}") as store,
    ):
        for asked in (store.cursor, lambda: store.batch([call("cursor")])):
            with pytest.raises(StoreError, match="is it a store server"):
                await asked()


async def test_a_proxy_that_answers_in_chunks_is_understood(address):
    async def pass_on(request: web.Request) -> web.StreamResponse:
        headers, path = dict(request.headers), request.path.removeprefix("/below")
        async with httpx.AsyncClient(base_url=address) as client:
            answer = await client.post(path, content=await request.read(), headers=headers)
        kind = {"content-type": answer.headers["content-type"]}
        response = web.StreamResponse(status=answer.status_code, headers=kind)
        response.enable_chunked_encoding()
        await response.prepare(request)
        for byte in answer.content:
            await response.write(bytes([byte]))
        return response

    app = web.Application()
    app.router.add_post("/below/v1/{verb}", pass_on)
    async with (
        TestServer(app, host="127.0.0.1") as proxy,
        HttpStore(f"http://127.0.0.1:{proxy.port}/below") as store,
    ):
        assert (await store.open_run("run", {})).epoch == 1
        assert await store.runs() == ["run"]


ANSWER = b"content-type: application/msgpack\r\ncontent-length: 1\r\n\r\n\x07"
ANSWERS = {
    "complete": b"HTTP/1.1 200 OK\r\n" + ANSWER,
    "after another": b"HTTP/1.1 103 Early Hints\r\nlink: x\r\n\r\nHTTP/1.1 200 OK\r\n" + ANSWER,
    "the last": b"HTTP/1.1 200 OK\r\nConnection: close\r\n" + ANSWER,
    "until the end": b"HTTP/1.1 200 OK\r\nContent-Type: application/msgpack; x\r\n\r\n\x07",
    "in chunks": b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\n1\r\n\x07\r\n0\r\n\r\n",
}


@contextlib.asynccontextmanager
async def answering(answer: bytes, size: int, ends: bool) -> AsyncIterator[str]:
    """The URL of what gives every request this answer, `size` bytes at a time."""

    connections = set[asyncio.Task[None]]()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        connections.add(asyncio.current_task())
        with contextlib.suppress(asyncio.IncompleteReadError, ConnectionError):
            while head := await reader.readuntil(b"\r\n\r\n"):
                (length,) = (line for line in head.split(b"\r\n") if b"content-length" in line)
                await reader.readexactly(int(length.partition(b":")[2]))
                for start in range(0, len(answer), size):
                    writer.write(answer[start : start + size])
                    await writer.drain()
                if ends:
                    break
        writer.close()

    async with await asyncio.start_server(serve, "127.0.0.1", 0) as listening:
        yield f"http://127.0.0.1:{listening.sockets[0].getsockname()[1]}"
        await asyncio.gather(*connections)


@pytest.mark.parametrize("size", [1, 1000])
@pytest.mark.parametrize("kind", ANSWERS)
async def test_an_answer_is_read_however_it_is_sent(kind, size):
    ends = kind in ("the last", "until the end")
    async with answering(ANSWERS[kind], size, ends) as url, HttpStore(url) as store:
        async with asyncio.timeout(20):
            assert [await store.cursor() for _ in range(3)] == [7, 7, 7]


@pytest.mark.parametrize("answer", [b"<html>", b"HTTP/9 200 OK", ANSWERS["complete"] + b"x"])
async def test_an_answer_that_is_no_http_is_not_asked_for_again(answer):
    async with answering(answer, 1000, False) as url, HttpStore(url) as store:
        async with asyncio.timeout(20):
            if answer.startswith(ANSWERS["complete"]):
                assert await store.cursor() == 7  # what nobody asked for is dropped
                assert await store.cursor() == 7
                return
            with pytest.raises(StoreError, match="is not a store server"):
                await store.cursor()


async def test_half_an_answer_is_a_lost_one():
    half = ANSWERS["complete"][:-1]
    async with answering(half, 1000, True) as url, HttpStore(f"{url}?patience=0") as store:
        with pytest.raises(Unavailable, match="the server closed the connection"):
            await store.cursor()


async def test_a_store_behind_https(address, certificate, monkeypatch):
    async def pass_on(request: web.Request) -> web.Response:
        async with httpx.AsyncClient(base_url=address) as client:
            headers = dict(request.headers)
            answer = await client.post(request.path, content=await request.read(), headers=headers)
        kind = answer.headers["content-type"]
        return web.Response(body=answer.content, status=answer.status_code, content_type=kind)

    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(*certificate.values())
    app = web.Application()
    app.router.add_post("/v1/{verb}", pass_on)
    proxy = TestServer(app, host="127.0.0.1", scheme="https")
    await proxy.start_server(ssl=context)
    url = f"https://127.0.0.1:{proxy.port}"
    async with HttpStore(f"{url}?patience=0") as store:
        with pytest.raises(Unavailable, match="certificate"):
            await store.cursor()
    monkeypatch.setenv("SSL_CERT_FILE", certificate["ssl_certfile"])
    async with HttpStore(url) as store:
        assert (await store.open_run("run", {})).epoch == 1
        assert await store.runs() == ["run"]
    await proxy.close()


async def test_a_call_that_is_given_up_takes_no_other_calls_answer(address, kit):
    async with open_store(address) as store:
        await store.open_run("run", {})
        for number in range(20):
            waiting = asyncio.create_task(store.claim(1, runner="r", lease=60, timeout=60))
            await asyncio.sleep(0)
            if number % 2:
                await store.cursor()
            waiting.cancel()
            assert await store.runs() == ["run"]
        await store.enqueue(kit.group("a", 1))
        assert len(await store.claim(1, runner="r", lease=60)) == 1


async def test_nobody_there():
    async with open_store(f"http://127.0.0.1:{free_port()}?patience=0") as store:
        with pytest.raises(Unavailable, match="cannot be reached"):
            await store.cursor()


# -- what the contract leaves open -----------------------------------------------------------------


async def test_one_object_in_several_loops_and_threads(address):
    store = open_store(address)
    found = []

    def elsewhere() -> None:
        found.append(asyncio.run(store.open_run("run", {})).epoch)

    for _ in range(2):
        thread = threading.Thread(target=elsewhere)
        thread.start()
        await asyncio.to_thread(thread.join)
    assert found == [1, 2]
    assert await store.runs() == ["run"]
    await store.close()
    with pytest.raises(StoreError, match="closed"):
        await store.runs()


async def test_a_batch_is_one_request(address, kit):
    async with HttpStore(address) as store:
        results = await store.batch(
            [
                call("open_run", "run", {}),
                call("enqueue", kit.group("a", 2)),
                call("settled", "none", timeout=0),
                call("claim", 2, runner="r", lease=60.0),
                call("publish", None),
            ]
        )
    state, new, unknown, attempts, wrong = results
    assert (state.epoch, new) == (1, 2)
    assert [attempt.rollout.id for attempt in attempts] == ["a/0", "a/1"]
    assert isinstance(unknown, NotFound)
    assert isinstance(wrong, Invalid)


async def test_a_call_that_cannot_be_sent_is_refused_at_its_place(address):
    wrong = call("open_run", "wrong", {"x": object()})
    async with HttpStore(address) as store:
        before, refused, after = await store.batch([call("cursor"), wrong, call("runs")])
        assert (before, after) == (0, [])
        assert isinstance(refused, Invalid)
        (refused,) = await store.batch([wrong])
        assert isinstance(refused, Invalid)


async def test_a_batch_does_not_wait(address):
    async with HttpStore(address) as store:
        (refused,) = await store.batch([call("wait", 0)])
        assert isinstance(refused, Invalid)


async def test_a_wait_goes_on_over_many_requests(address, kit, monkeypatch):
    monkeypatch.setattr("agentrl.store.http.wire.POLL", 0.02)
    async with open_store(address) as store:
        await store.open_run("run", {})
        waiting = asyncio.create_task(store.claim(1, runner="r", lease=60, timeout=60))
        assert await store.wait(await store.cursor(), timeout=0.1) == 1
        await store.enqueue(kit.group("a", 1))
        async with asyncio.timeout(10):
            assert [attempt.rollout.id for attempt in await waiting] == ["a/0"]


async def test_what_no_store_keeps_is_cleaned_or_refused(address, kit):
    async with open_store(address) as store:
        await store.open_run("run", {})
        await store.enqueue(kit.group("a", 1))
        (attempt,) = await store.claim(1, runner="r", lease=60)
        failure = Failure(kind=ErrorKind.AGENT, message="half \ud800", traceback="\udfff")
        span = kit.span(attempt, attributes={"n": 1})
        outcome = Outcome(attempt=attempt.id, fence=1, failure=failure, spans=[span])
        assert await store.finish([outcome]) == [True]
        (row,) = await store.rollouts("run")
        assert row.failure.message == "half ?"
        with pytest.raises(Invalid, match="NewRollout b/0 cannot be stored, for it is not JSON"):
            await store.enqueue(kit.group("b", 1, task={"input": "\ud800"}))


# -- servers that die ------------------------------------------------------------------------------


def rollout(name: str) -> NewRollout:
    return NewRollout(id=name, run="run", group=name, index=0, task={"input": name})


async def lifecycle(store, name: str) -> None:
    """Ends rollouts, its own or another's, until its own has ended."""
    await store.enqueue([rollout(name)])
    while not await store.settled(name, timeout=0):
        for attempt in await store.claim(1, runner=name, lease=600, timeout=0.2):
            outcome = Outcome(attempt=attempt.id, fence=attempt.fence, result=attempt.rollout.id)
            assert await store.finish([outcome]) == [True]


async def test_kill_9_of_the_server_is_only_a_delay(tmp_path):
    path, port = tmp_path / "store.db", free_port()
    done: asyncio.Queue[None] = asyncio.Queue()

    async def work(store, name: str) -> None:
        for number in range(12):
            await lifecycle(store, f"{name}/{number}")
            done.put_nowait(None)

    async with open_store(f"http://127.0.0.1:{port}") as store:
        with server(path, port) as process:
            await store.open_run("run", {})
            await store.enqueue([structs.replace(rollout("last"), priority=-1)])
            waiter = asyncio.create_task(store.settled("last"))
            workers = [asyncio.create_task(work(store, f"w{n}")) for n in range(16)]
            for _ in range(60):
                await done.get()
            process.kill()
        with server(path, port) as process:
            for _ in range(60):
                await done.get()
            process.kill()
        with server(path, port):
            async with asyncio.timeout(60):
                await asyncio.gather(*workers)
                await lifecycle(store, "last")
                assert await waiter
            rows = await store.rollouts("run")
    assert len(rows) == 16 * 12 + 1
    assert all((row.state, row.attempts) == (RolloutState.SUCCEEDED, 1) for row in rows)
    assert all(row.result == row.id for row in rows)


async def test_over_postgres_a_restart_is_only_a_delay_too(postgres, kit):
    url, port = postgres(), free_port()
    async with open_store(f"http://127.0.0.1:{port}") as store:
        with server(url, port) as process:
            epoch = (await store.open_run("run", {})).epoch
            assert await store.enqueue(kit.group("g", 2)) == 2
            first, second = await store.claim(2, runner="r", lease=60)
            calls = [kit.call(first, [1, 2], [3]), kit.call(first, [1, 2, 3, 4], [5])]
            assert await store.add_transitions(calls) == [True, True]
            assert await store.finish([kit.good(first)]) == [True]
            waiting = asyncio.create_task(store.claim_groups("run", epoch, 1))
            process.kill()
        with server(url, port):
            assert await store.add_transitions(calls) == [True, True]
            assert await store.finish([kit.good(first), kit.good(second)]) == [True, True]
            async with asyncio.timeout(20):
                (group,) = await waiting
            assert [call.prompt for call in group.rollouts[0].transitions] == [
                call.prompt for call in calls
            ]
            for _ in range(2):
                await store.commit_step(kit.step(0, ["g"], epoch))
            counts = await store.counts("run")
    assert (counts.succeeded, counts.transitions, counts.groups_trained) == (2, 2, 1)


async def test_a_lease_that_ran_out_while_the_server_was_down_holds_again(tmp_path, kit):
    path, port = tmp_path / "store.db", free_port()
    async with open_store(f"http://127.0.0.1:{port}") as store:
        with server(path, port) as process:
            await store.open_run("run", {})
            await store.enqueue(kit.group("a", 1))
            (attempt,) = await store.claim(1, runner="r", lease=0.2)
            process.kill()
        with server(path, port):  # which takes longer to start
            assert await store.claim(1, runner="s", lease=9) == []
            assert await store.heartbeat([attempt.id], lease=9) == [attempt.id]
            assert await store.finish([kit.good(attempt)]) == [True]


async def test_sigterm_ends_waits_at_once_and_finishes_the_rest(tmp_path, kit):
    path, port = tmp_path / "store.db", free_port()
    async with open_store(f"http://127.0.0.1:{port}") as store:
        with server(path, port) as process:
            await store.open_run("run", {})
            waiting = asyncio.create_task(store.claim(1, runner="r", lease=60, timeout=60))
            busy = [asyncio.create_task(store.log("run", n, {"x": 1.0})) for n in range(50)]
            await store.cursor()
            process.terminate()
            assert await asyncio.to_thread(process.wait, 15) == 0
        with server(path, port):
            await asyncio.gather(*busy)
            assert len(await store.steps("run")) == 50
            await store.enqueue(kit.group("a", 1))
            async with asyncio.timeout(20):
                assert [attempt.rollout.id for attempt in await waiting] == ["a/0"]


async def test_the_server_stays_as_small_as_it_starts(tmp_path, kit):
    path, port = tmp_path / "store.db", free_port()
    with server(path, port) as process:
        async with open_store(f"http://127.0.0.1:{port}") as store:
            await store.open_run("run", {})

            async def record(n: int) -> int:
                for number in range(n):
                    await store.enqueue(kit.group(f"{n}-{number}", 4))
                    attempts = await store.claim(4, runner="r", lease=60)
                    calls = [
                        kit.call(attempt, list(range(256)), list(range(128)))
                        for attempt in attempts
                        for _ in range(5)
                    ]
                    await store.add_transitions(calls)
                    await store.finish([kit.good(attempt) for attempt in attempts])
                return psutil.Process(process.pid).memory_info().rss

            before = await record(50)  # 1,000 transitions
            assert await record(200) - before < 16 * 2**20
            assert (await store.counts("run")).transitions == 5000


# -- the command -----------------------------------------------------------------------------------


def test_the_command_refuses_what_is_unsafe_or_wrong(tmp_path, monkeypatch):
    def served(store: str, *options: str, keys: str | None = None) -> str:
        if keys is not None:
            monkeypatch.setenv("AGENTRL_STORE_KEYS", keys)
        return refused("store", "serve", store, "--port", "0", *options)

    store = f"sqlite:///{tmp_path / 'store.db'}"
    assert "give keys" in served(store, "--host", "0.0.0.0")
    assert "is a server already" in served("http://127.0.0.1:1")
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        assert "choose another --port" in served(store, "--port", port)
    (empty := tmp_path / "keys").write_text("# none yet\n")
    assert "has no key" in served(store, "--keys", str(empty))
    assert "has no key" in served(store, keys="")
    said = served(store, keys="root:top-secret")
    assert "AGENTRL_STORE_KEYS, line 1" in said
    assert "top-secret" not in said


def test_it_works_in_uvicorns_event_loop(address: str) -> None:
    """Whose transports are of types of their own; `agentrl view` on a served store has it."""
    uvloop = pytest.importorskip("uvloop")

    async def names() -> list[str]:
        async with open_store(address) as store:
            await store.open_run("run", {})
            return await store.runs()

    assert uvloop.run(names()) == ["run"]
