"""Lets the requests of a server belong to no attempt, whoever started it.

Python serves each connection in the context in which the server was started. A server that is
started inside one attempt, such as a shared environment, an MCP server or a cache, also serves
other attempts, whose model calls would be recorded in the first. So inside attempts, and only
there, servers start in an empty context, and a task or thread other than the agent's own that
accepts a connection, or takes one item after the other from a queue to which another attempt has
put, is a server from then on. Their model calls need the attempt's own URL or key, or the
`traceparent` of the request that they serve; the gateway refuses others.
"""

from __future__ import annotations

import asyncio
import queue
import socket
import socketserver
import sys
from asyncio import base_events, selector_events
from collections.abc import Callable
from contextvars import Context, ContextVar
from functools import cache, wraps
from importlib import import_module
from importlib.util import find_spec
from typing import Any
from weakref import WeakKeyDictionary

from agentrl.runners.tracing import attempt_log

# To a queue; two attempts suffice.
_senders: WeakKeyDictionary[Any, set[str]] = WeakKeyDictionary()
# Ids of the queues from which this task or thread has taken an item, and put none since.
_taken_from: ContextVar[frozenset[int]] = ContextVar("taken_from", default=frozenset())


@cache
def install() -> None:
    """Patch the servers of Python and uvloop, once per process: those that uvicorn,
    aiohttp, Flask, MCP and others start."""
    _patch(base_events.Server, "_start_serving", _sync)
    _patch(socketserver.BaseServer, "_handle_request_noblock", _sync)
    _patch(socket.socket, "accept", _accept)
    _patch(selector_events.BaseSelectorEventLoop, "sock_accept", _sock_accept)
    _patch(asyncio.Queue, "put_nowait", _put)
    _patch(asyncio.Queue, "get_nowait", _get)
    _patch(queue.Queue, "put", _put)
    _patch(queue.Queue, "get", _get)
    if find_spec("uvicorn"):  # also for what it starts beside requests: an application's workers
        _patch(import_module("uvicorn.server").Server, "serve", _async)
    if find_spec("uvloop"):
        loop = import_module("uvloop").Loop
        _patch(loop, "create_server", _async)
        _patch(loop, "create_unix_server", _async)
        _patch(loop, "sock_accept", _sock_accept)


def install_imported() -> None:
    """Patch gRPC, and the queues of anyio, which MCP uses, if the process has imported them; call
    it at each attempt."""
    for module, owner, method, wrap in (
        ("grpc._server", "_Server", "start", _sync),
        ("grpc.aio._server", "Server", "start", _async),
        ("anyio.streams.memory", "MemoryObjectSendStream", "send_nowait", _put),
        ("anyio.streams.memory", "MemoryObjectReceiveStream", "receive", _receive),
    ):
        if module in sys.modules:
            _patch_once(module, owner, method, wrap)


@cache
def _patch_once(module: str, owner: str, method: str, wrap: Callable[..., Any]) -> None:
    _patch(getattr(sys.modules[module], owner), method, wrap)


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


def _put(put: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(put)
    def sent(self: Any, *args: Any, **kwargs: Any) -> Any:
        _taken_from.set(_taken_from.get() - {id(_queue_of(self))})
        if (log := attempt_log.current()) is not None:
            known = _senders.setdefault(_queue_of(self), set())
            if len(known) < 2:
                known.add(log.attempt)
        return put(self, *args, **kwargs)

    return sent


def _get(get: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(get)
    def taken(self: Any, *args: Any, **kwargs: Any) -> Any:
        item = get(self, *args, **kwargs)
        _leave_if_shared(self)
        return item

    return taken


def _receive(receive: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(receive)
    async def received(self: Any) -> Any:
        item = await receive(self)
        _leave_if_shared(self)
        return item

    return received


def _leave_if_shared(end: Any) -> None:
    """Leave if this takes one item after the other that others have put. Who puts back what it has
    taken, as users of a pool of connections do, serves nobody."""
    if (log := attempt_log.current()) is None:
        return
    shared, taken = _queue_of(end), _taken_from.get()
    if id(shared) not in taken:
        _taken_from.set(taken | {id(shared)})
    elif not _senders.get(shared, set()) <= {log.attempt}:
        attempt_log.leave_as_server()


def _queue_of(end: Any) -> Any:
    """The queue itself, or what both ends of anyio's have in common."""
    return getattr(end, "_state", end)
