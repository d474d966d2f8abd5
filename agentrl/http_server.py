"""aiohttp servers with time limits for requests that arrive incompletely.

aiohttp limits the time until the headers of a request are complete (`keepalive_timeout`, an hour by
default), but not the time until its body is.
"""

from __future__ import annotations

import asyncio

from aiohttp import web

REQUEST_TIMEOUT = 120.0  # seconds in which headers, and then the body, must arrive


async def listen(
    app: web.Application,
    host: str,
    port: int,
    *,
    timeout: float = REQUEST_TIMEOUT,
    shutdown: float = 1.0,
) -> tuple[web.AppRunner, str]:
    """Serve an application; returns its runner, to be cleaned up, and http://host:port.

    Connections without a complete request are closed after `timeout` seconds, and requests that
    are answered when the server ends have `shutdown` seconds. Raises OSError when
    the port is taken."""
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
        await web.TCPSite(runner, host, port, backlog=4096).start()
    except OSError:
        await runner.cleanup()
        raise
    return runner, f"http://{f'[{host}]' if ':' in host else host}:{runner.addresses[0][1]}"


async def read_body(request: web.Request, timeout: float = REQUEST_TIMEOUT) -> bytes:
    """The body of a request. Raises HTTPRequestTimeout, after whose answer aiohttp closes the
    connection, where it does not arrive within `timeout` seconds."""
    try:
        async with asyncio.timeout(timeout):
            return await request.read()
    except TimeoutError:
        raise web.HTTPRequestTimeout(
            text=f"the request's body did not arrive within {timeout:g} s"
        ) from None
