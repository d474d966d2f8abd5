"""Lets the requests of a server belong to no attempt, whoever started it.

Python serves each connection in the context in which the server was started. A server that is
started inside one attempt, such as a shared environment, an MCP server or a cache, also serves
other attempts, whose model calls would be recorded in the first. So inside attempts, and only
there, servers start in an empty context, and a task or thread other than the agent's own that
accepts a connection is a server from then on. Their model calls need the attempt's own URL or key,
or the `traceparent` of the request that they serve; the gateway refuses others.
"""

from __future__ import annotations

import asyncio
import socket
import socketserver
import sys
from asyncio import base_events, selector_events
from collections.abc import Callable
from contextvars import Context
from functools import cache, wraps
from importlib import import_module
from importlib.util import find_spec
from typing import Any

from agentrl.runners.tracing import attempt_log


@cache
def install() -> None:
    """Patch the servers of Python and uvloop, once per process: those that uvicorn,
    aiohttp, Flask, MCP and others start."""
    _patch(base_events.Server, "_start_serving", _sync)
    _patch(socketserver.BaseServer, "_handle_request_noblock", _sync)
    _patch(socket.socket, "accept", _accept)
    _patch(selector_events.BaseSelectorEventLoop, "sock_accept", _sock_accept)
    if find_spec("uvicorn"):  # also for what it starts beside requests: an application's workers
        _patch(import_module("uvicorn.server").Server, "serve", _async)
    if find_spec("uvloop"):
        loop = import_module("uvloop").Loop
        _patch(loop, "create_server", _async)
        _patch(loop, "create_unix_server", _async)
        _patch(loop, "sock_accept", _sock_accept)


def install_imported() -> None:
    """Patch gRPC if the process has imported it; call it at each attempt."""
    for module, server, wrap in (
        ("grpc._server", "_Server", _sync),
        ("grpc.aio._server", "Server", _async),
    ):
        if module in sys.modules:
            _patch_once(module, server, wrap)


@cache
def _patch_once(module: str, server: str, wrap: Callable[..., Any]) -> None:
    _patch(getattr(sys.modules[module], server), "start", wrap)


def _patch(owner: Any, method: str, wrap: Callable[..., Any]) -> None:
    setattr(owner, method, wrap(getattr(owner, method)))


def _sync(start: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(start)
    def outside(*args: Any, **kwargs: Any) -> Any:
        if attempt_log.current() is None:
            return start(*args, **kwargs)
        return Context().run(start, *args, **kwargs)

    return outside


def _async(start: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(start)
    async def outside(*args: Any, **kwargs: Any) -> Any:
        if attempt_log.current() is None:
            return await start(*args, **kwargs)
        loop = asyncio.get_running_loop()
        return await loop.create_task(start(*args, **kwargs), context=Context())

    return outside


def _accept(accept: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(accept)
    def accepted(*args: Any) -> Any:
        connection = accept(*args)
        attempt_log.leave_as_server()
        return connection

    return accepted


def _sock_accept(accept: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(accept)
    async def accepted(*args: Any) -> Any:
        connection = await accept(*args)
        attempt_log.leave_as_server()
        return connection

    return accepted
