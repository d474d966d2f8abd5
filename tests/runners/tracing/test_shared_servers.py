"""Servers that are started inside a rollout: whose are the model calls that they make?"""

from __future__ import annotations

import asyncio
import json
import os
import queue
import socket
import threading
from collections.abc import Awaitable, Callable
from concurrent.futures import Future
from contextlib import AsyncExitStack, suppress
from contextvars import copy_context
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import aiohttp
import anyio
import httpx
import pytest
import uvicorn
import uvloop
from aiohttp import web

from agentrl.core.types import ErrorKind
from agentrl.runners.executors.inprocess import InProcessExecutor, as_agent, in_trace, run_guarded
from agentrl.runners.tracing import attempt_log
from agentrl.runners.tracing import core as tracing
from agentrl.runners.tracing.attempt_log import AttemptLog

Start = Callable[[AsyncExitStack, bool], Awaitable[str]]
PATH = "/chat/completions"


def call_of(headers: Any, forward: bool) -> dict[str, Any]:
    """The headers of a server's own call: those that it keeps of its request."""
    return {"traceparent": headers["traceparent"]} if forward else {}


async def pass_on(body: bytes, headers: Any, forward: bool) -> bytes:
    async with httpx.AsyncClient(timeout=30) as client:
        url, own = os.environ["OPENAI_BASE_URL"] + PATH, call_of(headers, forward)
        return (await client.post(url, content=body, headers=own)).content


async def with_aiohttp(stack: AsyncExitStack, forward: bool) -> str:
    async def serve(request: web.Request) -> web.Response:
        return web.Response(body=await pass_on(await request.read(), request.headers, forward))

    app = web.Application()
    app.router.add_post(PATH, serve)
    runner = web.AppRunner(app)
    await runner.setup()
    stack.push_async_callback(runner.cleanup)
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    return f"http://127.0.0.1:{runner.addresses[0][1]}"


def asgi(forward: bool) -> Any:
    async def app(scope: Any, receive: Any, send: Any) -> None:
        headers = {name.decode(): value.decode() for name, value in scope["headers"]}
        body = (await receive())["body"]
        answer = await pass_on(body, headers, forward)
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": answer})

    return app


async def with_uvicorn(stack: AsyncExitStack, forward: bool) -> str:
    config = uvicorn.Config(asgi(forward), port=0, lifespan="off", log_config=None)
    return await started_by_uvicorn(stack, config)


async def started_by_uvicorn(stack: AsyncExitStack, config: uvicorn.Config) -> str:
    server = uvicorn.Server(config)
    running = asyncio.create_task(server.serve())

    async def stop() -> None:
        server.should_exit = True
        await running

    stack.push_async_callback(stop)
    while not server.started:  # noqa: ASYNC110 - uvicorn has no event for it
        await asyncio.sleep(0.01)
    return f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}"


async def with_uvloop_in_a_thread(stack: AsyncExitStack, forward: bool) -> str:
    """As a server that an environment starts beside itself, with a loop of its own."""
    loop = uvloop.new_event_loop()
    thread = threading.Thread(target=loop.run_forever)
    thread.start()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = (await reader.readuntil(b"\r\n\r\n")).decode().lower()
        headers = dict(line.split(": ", 1) for line in head.splitlines()[1:] if line)
        body = await reader.readexactly(int(headers["content-length"]))
        answer = await pass_on(body, headers, forward)
        writer.write(b"HTTP/1.1 200 OK\r\nConnection: close\r\n\r\n" + answer)
        await writer.drain()
        writer.close()

    async def close() -> None:
        server.close()
        await server.wait_closed()

    async def stop() -> None:
        await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(close(), loop))
        loop.call_soon_threadsafe(loop.stop)
        await asyncio.to_thread(thread.join)
        loop.close()

    stack.push_async_callback(stop)
    starting = asyncio.start_server(serve, "127.0.0.1", 0)
    server = await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(starting, loop))
    return f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"


async def with_threads(stack: AsyncExitStack, forward: bool) -> str:
    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["content-length"]))
            url, own = os.environ["OPENAI_BASE_URL"] + PATH, call_of(self.headers, forward)
            answer = httpx.post(url, content=body, headers=own, timeout=30).content
            self.send_response(200)
            self.end_headers()
            self.wfile.write(answer)

        def log_message(self, *args: Any) -> None: ...

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()

    async def stop() -> None:
        await asyncio.to_thread(server.shutdown)
        server.server_close()
        thread.join()

    stack.push_async_callback(stop)
    return f"http://127.0.0.1:{server.server_port}"


async def with_a_worker_beside_requests(stack: AsyncExitStack, forward: bool) -> str:
    """An application that does its work in a task which it starts before the first request."""
    work = asyncio.Queue[Any]()

    async def worker() -> None:
        while True:
            body, headers, future = await work.get()
            future.set_result(await pass_on(body, headers, forward))

    async def app(scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] == "lifespan":
            await receive()
            task = asyncio.create_task(worker())
            await send({"type": "lifespan.startup.complete"})
            await receive()
            task.cancel()
            await send({"type": "lifespan.shutdown.complete"})
            return
        headers = {name.decode(): value.decode() for name, value in scope["headers"]}
        answer = asyncio.get_running_loop().create_future()
        work.put_nowait(((await receive())["body"], headers, answer))
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": await answer})

    return await started_by_uvicorn(stack, uvicorn.Config(app, port=0, log_config=None))


def answered(request: bytes, forward: bool) -> bytes:
    head, _, body = request.partition(b"\r\n\r\n")
    headers = dict(line.split(": ", 1) for line in head.decode().lower().splitlines()[1:])
    url, own = os.environ["OPENAI_BASE_URL"] + PATH, call_of(headers, forward)
    answer = httpx.post(url, content=body, headers=own, timeout=30).content
    return b"HTTP/1.1 200 OK\r\nConnection: close\r\n\r\n" + answer


def read_request(connection: socket.socket) -> bytes:
    request = connection.recv(65536)
    while b"messages" not in request:
        request += connection.recv(65536)
    return request


async def with_sockets_and_threads(stack: AsyncExitStack, forward: bool) -> str:
    listening = socket.create_server(("127.0.0.1", 0))

    def serve(connection: socket.socket) -> None:
        with connection:
            connection.sendall(answered(read_request(connection), forward))

    def accept() -> None:
        with suppress(OSError):
            while True:
                connection, _ = listening.accept()
                threading.Thread(target=serve, args=(connection,)).start()

    thread = threading.Thread(target=accept)
    thread.start()

    def stop() -> None:
        listening.shutdown(socket.SHUT_RDWR)
        thread.join()
        listening.close()

    stack.callback(stop)
    return f"http://127.0.0.1:{listening.getsockname()[1]}"


async def with_anyio(stack: AsyncExitStack, forward: bool) -> str:
    listener = await anyio.create_tcp_listener(local_host="127.0.0.1", local_port=0)

    async def serve(stream: Any) -> None:
        async with stream:
            request = await stream.receive()
            while b"messages" not in request:
                request += await stream.receive()
            await stream.send(await asyncio.to_thread(answered, request, forward))

    async def stop() -> None:
        running.cancel()
        await asyncio.wait({running})
        await listener.aclose()

    running = asyncio.create_task(listener.serve(serve))
    stack.push_async_callback(stop)
    return f"http://127.0.0.1:{listener.extra(anyio.abc.SocketAttribute.local_port)}"


SERVERS = [with_aiohttp, with_uvicorn, with_uvloop_in_a_thread, with_threads]
SERVERS += [with_a_worker_beside_requests, with_sockets_and_threads, with_anyio]


async def play(bench: Any, start: Start, forward: bool) -> Any:
    """Rollouts that ask through a server which the first of them starts."""
    url: asyncio.Task[str] | None = None

    async with AsyncExitStack() as stack:

        async def agent(text: str) -> str:
            nonlocal url
            url = url or asyncio.create_task(start(stack, forward))
            body = {"model": "m", "messages": [{"role": "user", "content": text}]}
            async with httpx.AsyncClient(timeout=30) as client:
                answer = (await client.post(await url + PATH, json=body)).json()
            return str((answer.get("choices") or [answer])[0]["message"]["content"])

        tasks = [{"input": f"t{i}"} for i in range(4)]
        return await bench.run(agent, *tasks, concurrency=4, calls_optional=False, timeout=20.0)


@pytest.mark.parametrize("start", SERVERS)
async def test_calls_of_a_shared_server_are_in_no_rollout_by_guess(
    bench: Any, start: Start
) -> None:
    """Each is in the rollout whose trace it forwards, and without one in none."""
    for rollout in await play(bench, start, forward=False):
        assert rollout.failure is not None
        assert not (await bench.store.trace(rollout.id)).transitions
    assert not bench.model.requests
    for rollout in await play(bench, start, forward=True):
        assert rollout.failure is None, rollout.failure
        (call,) = (await bench.store.trace(rollout.id)).transitions
        assert call.messages[-1]["content"] == rollout.task["input"]


async def test_the_failure_says_what_a_shared_server_should_do(bench: Any) -> None:
    url: str | None = None

    async with AsyncExitStack() as stack:

        async def agent(text: str) -> str:
            nonlocal url
            url = url or await with_aiohttp(stack, forward=False)
            body = {"model": "m", "messages": [{"role": "user", "content": text}]}
            async with aiohttp.ClientSession() as session, session.post(url + PATH, json=body) as r:
                return json.loads(await r.read())["error"]["message"]

        (rollout,) = await bench.run(agent, {"input": "x"}, calls_optional=False)
    assert "let it forward the traceparent header" in str(rollout.result)
    assert rollout.failure.kind is ErrorKind.NO_CALL
    assert "a server that one rollout started for all: let it forward" in rollout.failure.message


def with_asyncio(stack: AsyncExitStack, own: bool) -> Any:
    waiting: asyncio.Queue[Any] = asyncio.Queue()
    working: list[asyncio.Task[None]] = []

    async def work() -> None:
        while True:
            text, context, answer = await waiting.get()
            asking = asyncio.create_task(asked(text), context=context if own else None)
            answer.set_result(await asking)

    async def ask(text: str) -> str:
        if not working:
            working.append(asyncio.create_task(work()))
            stack.callback(working[0].cancel)
        answer = asyncio.get_running_loop().create_future()
        await waiting.put((text, copy_context(), answer))
        return str(await answer)

    return ask


def with_threads_and_a_queue(stack: AsyncExitStack, own: bool) -> Any:
    waiting: queue.Queue[Any] = queue.Queue()
    working: list[threading.Thread] = []

    def work() -> None:
        while True:
            text, context, answer = waiting.get()
            run = context.run if own else lambda function, *args: function(*args)
            answer.set_result(run(asyncio.run, asked(text)))

    async def ask(text: str) -> str:
        if not working:
            working.append(threading.Thread(target=work, daemon=True))
            working[0].start()
        answer: Future[str] = Future()
        waiting.put((text, copy_context(), answer))
        return await asyncio.wrap_future(answer)

    return ask


def with_anyio_streams(stack: AsyncExitStack, own: bool) -> Any:
    send, receive = anyio.create_memory_object_stream[Any](16)
    stack.callback(send.close)
    stack.callback(receive.close)
    working: list[asyncio.Task[None]] = []

    async def work() -> None:
        async for text, context, answer in receive:
            asking = asyncio.create_task(asked(text), context=context if own else None)
            answer.set_result(await asking)

    async def ask(text: str) -> str:
        if not working:
            working.append(asyncio.create_task(work()))
            stack.callback(working[0].cancel)
        answer = asyncio.get_running_loop().create_future()
        await send.send((text, copy_context(), answer))
        return str(await answer)

    return ask


async def asked(text: str) -> str:
    body = {"model": "m", "messages": [{"role": "user", "content": text}]}
    async with httpx.AsyncClient(timeout=30) as client:
        answer = (await client.post(os.environ["OPENAI_BASE_URL"] + PATH, json=body)).json()
    if "error" in answer:
        return str(answer["error"]["message"])
    return str(answer["choices"][0]["message"]["content"])


@pytest.mark.parametrize("make", [with_asyncio, with_threads_and_a_queue, with_anyio_streams])
@pytest.mark.parametrize("own", [True, False])
async def test_who_takes_what_others_have_queued_works_for_no_rollout_by_guess(
    bench: Any, make: Any, own: bool
) -> None:
    """Unless it runs each item in its sender's context."""
    together = asyncio.Barrier(3)
    async with AsyncExitStack() as stack:
        ask = make(stack, own)

        async def agent(text: str) -> str:
            if text == "t0":  # whose task or thread works for all, and which goes on meanwhile
                await ask("t0")
            await together.wait()
            said = "" if text == "t0" else await ask(text)
            await together.wait()
            return str(said)

        tasks = [{"input": f"t{i}"} for i in range(3)]
        rollouts = await bench.run(agent, *tasks, concurrency=3, timeout=20.0)
    stored = [(await bench.store.trace(rollout.id)).transitions for rollout in rollouts]
    for rollout, calls in zip(rollouts[1:], stored[1:], strict=True):
        assert len(calls) == own
        assert own or "belongs to no rollout" in str(rollout.result)
    assert [call.messages[-1]["content"] for call in stored[0]] == ["t0"]


async def test_a_server_of_one_rollout_uses_the_attempts_own_url(bench: Any) -> None:
    async def agent(text: str) -> str:
        attempt = asyncio.Queue[str]()

        async def serve(request: web.Request) -> web.Response:
            base = os.environ["OPENAI_BASE_URL"].removesuffix("/v1")
            url = f"{base}/a/{await attempt.get()}/v1{PATH}"
            async with httpx.AsyncClient(timeout=30) as client:
                return web.Response(
                    body=(await client.post(url, json=await request.json())).content
                )

        app = web.Application()
        app.router.add_post(PATH, serve)
        runner = web.AppRunner(app)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        attempt.put_nowait(bench.gateway.attempts.active()[0].id)
        body = {"model": "m", "messages": [{"role": "user", "content": text}]}
        async with httpx.AsyncClient(timeout=30) as client:
            url = f"http://127.0.0.1:{runner.addresses[0][1]}{PATH}"
            answer = (await client.post(url, json=body)).json()
        await runner.cleanup()
        return str(answer["choices"][0]["message"]["content"])

    (rollout,) = await bench.run(agent, {"input": "x"}, calls_optional=False)
    assert rollout.result == "echo x"
    assert len((await bench.store.trace(rollout.id)).transitions) == 1


@pytest.mark.parametrize("threaded", [False, True])
@pytest.mark.parametrize("sync", [False, True])
async def test_an_agent_that_waits_for_a_connection_itself_goes_on(
    bench: Any, sync: bool, threaded: bool
) -> None:
    """Such as one that starts a simulator, which connects to it."""

    def wait() -> None:
        listening = socket.create_server(("127.0.0.1", 0))
        with listening, socket.create_connection(listening.getsockname()):
            listening.accept()[0].close()

    def plain(text: str) -> str:
        wait()
        body = {"model": "m", "messages": [{"role": "user", "content": text}]}
        answer = httpx.post(os.environ["OPENAI_BASE_URL"] + PATH, json=body, timeout=30).json()
        return str(answer["choices"][0]["message"]["content"])

    async def asynchronous(text: str) -> str:
        wait()
        body = {"model": "m", "messages": [{"role": "user", "content": text}]}
        async with httpx.AsyncClient(timeout=30) as client:
            answer = await client.post(os.environ["OPENAI_BASE_URL"] + PATH, json=body)
        return str(answer.json()["choices"][0]["message"]["content"])

    executor = InProcessExecutor(as_agent(plain if sync else asynchronous), threaded=threaded)
    (rollout,) = await bench.run(executor, {"input": "x"}, calls_optional=False)
    assert rollout.result == "echo x", rollout.failure


@pytest.mark.parametrize("pool", [queue.LifoQueue, queue.Queue])
async def test_who_puts_back_what_it_has_taken_is_no_server(pool: Any) -> None:
    """As the users of a pool of connections that rollouts share, in threads of their own."""
    connections, still = pool(), list[bool]()
    connections.put("connection")

    def tool() -> None:
        for _ in range(3):
            connections.put(connections.get())
        still.append(attempt_log.current() is not None)

    async def agent(value: Any) -> None:
        await asyncio.to_thread(tool)

    tracing.install()
    for number in range(3):
        await in_trace(f"{number:032x}", run_guarded(agent, None))
    assert still == [True] * 3


async def in_rollout(number: int, agent: Callable[[], Awaitable[None]]) -> None:
    tracing.install()
    await in_trace(f"{number:032x}", run_guarded(lambda _: agent(), None))


def task_that_takes() -> tuple[Any, Any]:
    """What puts an item, and what starts a task that takes one, and returns whose it is then."""
    items: asyncio.Queue[str] = asyncio.Queue()

    async def work() -> AttemptLog | None:
        await items.get()
        return attempt_log.current()

    return lambda item: items.put_nowait(item), lambda: asyncio.create_task(work())


def thread_that_takes() -> tuple[Any, Any]:
    items: queue.Queue[str] = queue.Queue()

    def work() -> AttemptLog | None:
        items.get()
        return attempt_log.current()

    return lambda item: items.put(item), lambda: asyncio.create_task(asyncio.to_thread(work))


def stream_that_takes() -> tuple[Any, Any]:
    send, receive = anyio.create_memory_object_stream[str](16)

    async def work() -> AttemptLog | None:
        with send, receive:
            await receive.receive()
        return attempt_log.current()

    return lambda item: send.send_nowait(item), lambda: asyncio.create_task(work())


@pytest.mark.parametrize("make", [task_that_takes, thread_that_takes, stream_that_takes])
@pytest.mark.parametrize("same", [False, True])
async def test_a_workers_first_item_is_no_other_rollouts_by_guess(make: Any, same: bool) -> None:
    put, start = make()
    working = list[Any]()

    async def first() -> None:
        working.append(start())
        await asyncio.sleep(0.01)
        if same:
            put("mine")

    async def second() -> None:
        if not same:
            put("theirs")

    await in_rollout(1, first)
    await in_rollout(2, second)
    assert (await working[0] is None) != same


async def test_an_answer_that_another_rollouts_client_has_received_is_no_task() -> None:
    """As of a connection that rollouts share, whose first has started what reads from it."""
    requests: asyncio.Queue[Any] = asyncio.Queue()
    still, reading = list[bool](), list[Any]()

    async def read() -> None:
        while True:
            reply = await requests.get()
            reply.put_nowait("answer")

    async def ask() -> None:
        reply: asyncio.Queue[str] = asyncio.Queue()
        requests.put_nowait(reply)
        await reply.get()
        still.append(attempt_log.current() is not None)

    async def agent() -> None:
        if not reading:
            reading.append(asyncio.create_task(read()))
        await asyncio.create_task(ask())

    for number in range(3):
        await in_rollout(number + 1, agent)
    reading[0].cancel()
    assert still == [True] * 3


@pytest.mark.parametrize("full", [False, True])
async def test_a_pool_that_another_rollout_has_filled_is_no_work(full: bool) -> None:
    """With what it makes when the pool has none, or with places for what is made later."""
    pool: queue.Queue[Any] = queue.Queue()
    still = list[bool]()

    def use() -> None:
        try:
            made = pool.get_nowait() or "connection"
        except queue.Empty:
            made = "connection"
        still.append(attempt_log.current() is not None)
        pool.put(made)

    async def agent() -> None:
        if full and not still:
            pool.put(None)
        elif not full and not still:
            use()  # the agent itself
        await asyncio.to_thread(use)

    for number in range(3):
        await in_rollout(number + 1, agent)
    assert set(still) == {True}


async def test_a_queue_of_a_users_class_works() -> None:
    class Lines(asyncio.Queue[str]):
        __hash__ = None  # type: ignore[assignment]
        _state = "open"

    async def agent() -> None:
        lines = Lines()
        lines.put_nowait("a")
        said.append(await lines.get())

    said = list[str]()
    await in_rollout(1, agent)
    assert said == ["a"]
