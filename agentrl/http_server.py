"""aiohttp servers with time limits for requests that arrive incompletely.

aiohttp limits the time until the headers of a request are complete (`keepalive_timeout`, an hour by
default), but not the time until its body is.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import suppress

from aiohttp import web
from aiohttp.typedefs import Middleware

from agentrl.access import ANYBODY, Access, given_key

NO_KEY = "the API key is missing or unknown; send one of engine.key_env as a bearer token"
REQUEST_TIMEOUT = 120.0  # seconds in which headers, and then the body, must arrive


def server_loop() -> asyncio.AbstractEventLoop:
    """For a thread that only serves: uvloop's where that is installed, as by `agentrl[server]`,
    with which a model call through the gateway takes less CPU."""
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
) -> tuple[web.AppRunner, str]:
    """Serve an application; returns its runner, to be cleaned up, and http://host:port, or
    with a certificate https. `access` of requests is what `app` checks, by `ask_for_key`.

    Connections without a complete request are closed after `timeout` seconds, and requests that
    are answered when the server ends have `shutdown` seconds. Raises OSError when
    the port is taken, and ConfigError for a certificate that cannot be read."""
    tls = access.server_tls()
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
        await web.TCPSite(runner, host, port, backlog=4096, ssl_context=tls).start()
    except OSError:
        await runner.cleanup()
        raise
    scheme = "https" if tls else "http"
    return runner, f"{scheme}://{f'[{host}]' if ':' in host else host}:{runner.addresses[0][1]}"


def ask_for_key(access: Access) -> Middleware:
    """Middleware that refuses requests without a key, but for /health."""

    @web.middleware
    async def checked(
        request: web.Request, handler: Callable[[web.Request], Awaitable[web.StreamResponse]]
    ) -> web.StreamResponse:
        key = given_key(request.headers.get("authorization"), request.headers.get("x-api-key"))
        if request.path == "/health" or access.allows(key):
            return await handler(request)
        return web.json_response({"error": {"message": NO_KEY}}, status=401)

    return checked


async def read_body(request: web.Request, timeout: float = REQUEST_TIMEOUT) -> bytes:
    """The body of a request. Raises HTTPRequestTimeout, after whose answer aiohttp closes the
    connection, where it does not arrive within `timeout` seconds."""
    if request.content.is_eof():  # it came with the headers, as most do
        return await request.read()
    try:
        async with asyncio.timeout(timeout):
            return await request.read()
    except TimeoutError:
        raise web.HTTPRequestTimeout(
            text=f"the request's body did not arrive within {timeout:g} s"
        ) from None
