"""Requests that are sent by halves hold no connection for ever."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator

import httpx
import pytest
from aiohttp import web

from agentrl.core.http import listen, read_body, server_loop

WHOLE = b"POST / HTTP/1.1\r\nHost: localhost\r\nContent-Length: 2\r\n\r\nhi"


async def told(url: str, sent: bytes) -> bytes:
    """What a server answers until it closes the connection."""
    host, _, port = url.removeprefix("http://").rpartition(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    writer.write(sent)
    try:
        return await asyncio.wait_for(reader.read(), 10)
    finally:
        writer.close()


@pytest.mark.parametrize(
    ("sent", "answer"),
    [
        (b"", b""),
        (WHOLE[:7], b""),
        (WHOLE[:20], b""),
        (WHOLE[:-1], b"408 Request Timeout"),
        (WHOLE, b"200 OK"),  # closed as idle
        (WHOLE + WHOLE[:7], b"200 OK"),
    ],
)
async def test_a_half_sent_request_is_answered_or_closed_in_time(
    sent: bytes, answer: bytes
) -> None:
    async def echo(request: web.Request) -> web.Response:
        return web.Response(body=await read_body(request, timeout=0.1))

    app = web.Application()
    app.router.add_post("/", echo)
    runner, url = await listen(app, "127.0.0.1", 0, timeout=0.1)
    try:
        assert answer in await told(url, sent)
    finally:
        await runner.cleanup()


@pytest.mark.parametrize(
    ("body", "answer"),
    [
        (b'{"content": "%s"}' % (b"x" * 900), b"200 OK"),
        (b'{"content": "%s' % (b"x" * 1000), b"bytes of text, more than any model's context"),
        (b'{"url": "data:image/png;base64,%s"}' % (b"x" * 1000), b"200 OK"),
        (b'{"url": "data:image/png;base64,%s' % (b"x" * 3000), b"larger than 2000 bytes"),
    ],
)
async def test_more_text_than_a_context_has_is_refused_before_it_has_come(
    monkeypatch: pytest.MonkeyPatch, body: bytes, answer: bytes
) -> None:
    monkeypatch.setattr("agentrl.core.http.MAX_TEXT_BYTES", 1000)

    async def count(request: web.Request) -> web.Response:
        return web.Response(text=str(len(await read_body(request))))

    app = web.Application(client_max_size=2000)
    app.router.add_post("/", count)
    runner, url = await listen(app, "127.0.0.1", 0, timeout=0.1)
    length = len(body) if body.endswith(b"}") else 9000
    head = b"POST / HTTP/1.1\r\nHost: localhost\r\nContent-Length: %d\r\n\r\n" % length
    try:
        assert answer in await told(url, head + body)
    finally:
        await runner.cleanup()


@pytest.mark.parametrize("installed", [True, False])
def test_servers_run_on_the_loop_that_is_there(
    monkeypatch: pytest.MonkeyPatch, installed: bool
) -> None:
    uvloop = pytest.importorskip("uvloop")
    if not installed:
        monkeypatch.setitem(sys.modules, "uvloop", None)
    loop = server_loop()
    try:
        assert isinstance(loop, uvloop.Loop) is installed
        assert loop.run_until_complete(asyncio.sleep(0, "served")) == "served"
    finally:
        loop.close()


async def test_a_body_is_read_again_as_it_was() -> None:
    """Also one that came after its headers: middleware and handler both read it."""

    async def twice(request: web.Request) -> web.Response:
        return web.json_response([(await read_body(request)).decode() for _ in range(2)])

    async def slow() -> AsyncIterator[bytes]:
        for part in (b'{"a"', b": 1}"):
            await asyncio.sleep(0.02)
            yield part

    app = web.Application()
    app.router.add_post("/", twice)
    runner, url = await listen(app, "127.0.0.1", 0)
    async with httpx.AsyncClient() as client:
        for body in (b'{"a": 1}', slow()):
            answer = await client.post(url, content=body)
            assert answer.json() == ['{"a": 1}'] * 2
    await runner.cleanup()
