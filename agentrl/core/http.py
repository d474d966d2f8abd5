"""aiohttp servers with time limits for incomplete requests.

aiohttp limits the time until the headers of a request are complete (`keepalive_timeout`, an hour by
default), but not the time until its body is complete; `read_body` does.
"""

from __future__ import annotations

import asyncio
import socket
from codecs import BOM_UTF8
from collections.abc import Awaitable, Callable, Mapping
from contextlib import suppress

from aiohttp import web
from aiohttp.typedefs import Middleware

from agentrl.core.access import ANYBODY, Access, cross_site, is_loopback
from agentrl.core.values import SMALL_BODY, json_values

NO_KEY = "the API key is missing or unknown; send one of engine.key_env as a bearer token"
KEY_HEADERS = ("x-api-key", "x-goog-api-key", "api-key")  # of Anthropic, Google and Azure
PAGE_HEADERS = ("host", "content-type", "origin")  # headers that reveal a request of a web page
HEADER = ("utf-8", "surrogateescape")  # how aiohttp decodes headers
BODY = web.RequestKey("body", bytes)  # the part of a body that arrived with the headers
MAX_TEXT_BYTES = 9 * 2**20  # bytes of a request without files: over two million tokens
# Bytes of a request with spans, each of which may repeat a conversation.
MAX_SPANS_BYTES = 16 * 2**20
FILES = (b"base64", b"inlineData", b"inline_data", b"input_audio", b"file_data")  # announce files
MAX_VALUES = 200_000  # strings, lists and objects of a request
PROTOBUF = "application/x-protobuf"  # content type
REQUEST_TIMEOUT = 120.0  # seconds for the headers, and again for the body


def server_loop() -> asyncio.AbstractEventLoop:
    """An event loop for a server thread: uvloop's if it is installed (extra `server`), which takes
    less CPU for each model call through the gateway."""
    with suppress(ImportError):
        import uvloop

        return uvloop.new_event_loop()
    return asyncio.new_event_loop()


async def listen(
    app: web.Application,
    host: str,
    port: int,
    *,
    timeout: float = REQUEST_TIMEOUT,
    shutdown: float = 1.0,
    access: Access = ANYBODY,
    socket: socket.socket | None = None,
) -> tuple[web.AppRunner, str]:
    """Serve an application. Returns its runner, which the caller must clean up, and its URL.

    access: the certificate, if there is one; `app` checks keys itself, with `require_key`. Requests
    without a key that a web page may have sent are rejected if only this machine can connect; if
    other machines can, `app` must require a key. timeout: seconds until a connection without a
    complete request is closed. shutdown: seconds that requests in progress have when the server
    stops. socket: a listening one, in place of `host` and `port`. Raises OSError if the
    port is in use, and ConfigError for a certificate that cannot be read."""
    tls = access.server_tls()
    if is_loopback(socket.getsockname()[0] if socket else host):
        app.middlewares.insert(0, _reject_web_pages(access))
    runner = web.AppRunner(
        app,
        handler_cancellation=True,
        access_log=None,
        shutdown_timeout=shutdown,
        keepalive_timeout=timeout,
        lingering_time=min(timeout, 10.0),
    )
    await runner.setup()
    try:
        if socket is None:
            await web.TCPSite(runner, host, port, backlog=4096, ssl_context=tls).start()
        else:
            await web.SockSite(runner, socket, backlog=4096, ssl_context=tls).start()
    except OSError:
        await runner.cleanup()
        raise
    scheme = "https" if tls else "http"
    return runner, f"{scheme}://{f'[{host}]' if ':' in host else host}:{runner.addresses[0][1]}"


def _reject_web_pages(access: Access) -> Middleware:
    """Middleware that rejects requests that a web page in a browser of this machine may have
    sent."""

    @web.middleware
    async def checked(
        request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
    ) -> web.StreamResponse:
        if access.keys and access.allows(request_key(request.headers)):
            return await handler(request)
        has_key = any(name in request.headers for name in ("authorization", *KEY_HEADERS))
        sent = (request.headers.get(name, "").encode(*HEADER) for name in PAGE_HEADERS)
        rejection = cross_site(request.method, *sent, has_key=has_key)
        if rejection is None:
            return await handler(request)
        status, message = rejection
        return web.json_response({"error": {"message": message, "code": status}}, status=status)

    return checked


def require_key(access: Access) -> Middleware:
    """Middleware that refuses requests without a valid key, except to /health."""

    @web.middleware
    async def checked(
        request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
    ) -> web.StreamResponse:
        if request.path == "/health" or access.allows(request_key(request.headers)):
            return await handler(request)
        return web.json_response({"error": {"message": NO_KEY}}, status=401)

    return checked


async def read_body(
    request: web.Request, timeout: float = REQUEST_TIMEOUT, *, spans: bool = False
) -> bytes:
    """The body of a request, without a byte order mark; a second call returns the same.

    Raises HTTPRequestEntityTooLarge as soon as more than MAX_TEXT_BYTES (MAX_SPANS_BYTES of
    `spans`) have arrived without a sign of files among them, and for more than MAX_VALUES JSON
    values, whose decoding would block other requests; HTTPRequestTimeout if the body does not
    arrive within `timeout` seconds, in which case aiohttp closes the connection after the
    response."""
    cached: bytes | None = request.get(BODY)
    if cached is not None:
        return cached
    largest = MAX_SPANS_BYTES if spans else MAX_TEXT_BYTES
    largest = min(largest, request.client_max_size or largest)
    if request.content.is_eof() and request.content.total_bytes <= largest:
        body = (await request.read()).removeprefix(BOM_UTF8)  # most arrive with the headers
        return await _check_values(request, body)
    try:
        async with asyncio.timeout(timeout):
            body = (await _read_checked(request, spans)).removeprefix(BOM_UTF8)
    except TimeoutError:
        raise web.HTTPRequestTimeout(
            text=f"the request's body did not arrive within {timeout:g} s"
        ) from None
    request[BODY] = await _check_values(request, body)
    return body


async def _check_values(request: web.Request, body: bytes) -> bytes:
    if len(body) <= SMALL_BODY or request.content_type == PROTOBUF:
        return body
    if await asyncio.to_thread(json_values, body, MAX_VALUES) > MAX_VALUES:
        problem = f"the request has more than {MAX_VALUES:,} strings, lists and objects"
        raise _too_large(len(body) - 1, f"{problem}: send fewer at a time")
    return body


async def _read_checked(request: web.Request, spans: bool) -> bytes:
    if spans:
        max_text, what = MAX_SPANS_BYTES, "spans: export fewer at a time"
    else:
        max_text, what = MAX_TEXT_BYTES, "text, more than any model's context: shorten its messages"
    body, max_size = bytearray(), request.client_max_size
    async for part in request.content.iter_any():
        small = len(body) <= max_text
        body += part
        if 0 < max_size < len(body):
            raise _too_large(max_size, f"the request is larger than {max_size} bytes")
        if small and len(body) > max_text and not any(map(body.__contains__, FILES)):
            raise _too_large(max_text, f"the request has more than {max_text} bytes of {what}")
    return bytes(body)


def _too_large(max_size: int, message: str) -> web.HTTPRequestEntityTooLarge:
    return web.HTTPRequestEntityTooLarge(max_size=max_size, actual_size=max_size + 1, text=message)


def request_key(headers: Mapping[str, str]) -> str:
    """The API key that a request sends. Names in `headers` are lower-case, or match any case."""
    sent = next(filter(None, map(headers.get, KEY_HEADERS)), "")
    return sent.strip() or bearer(headers.get("authorization", ""))


def bearer(authorization: str) -> str:
    """The token of a header Authorization, in which any case of the scheme is valid (RFC 9110)."""
    scheme, _, token = authorization.strip().partition(" ")
    return token.strip() if scheme.lower() == "bearer" else authorization.strip()
