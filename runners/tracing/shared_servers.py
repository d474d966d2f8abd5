"""Servers that attempts share: their requests belong to no attempt.

Python serves each connection in the context in which the server was started. A server that is
started inside one attempt, such as a shared environment, an MCP server or a cache, also serves
other attempts, whose model calls would be recorded in the first. So inside attempts, and only
there, servers start in an empty context, and a task or thread other than the agent's own that
accepts a connection, or takes from a queue what another attempt has put, is a server from then on.
Their model calls need the attempt's own URL or key, or the `traceparent` of the request that they
serve; the gateway refuses others.
"""

from __future__ import annotations

import asyncio
import queue
import socket
import socketserver
import sys
from asyncio import base_events, selector_events
from collections.abc import Callable, Mapping
from contextvars import Context, ContextVar
from dataclasses import dataclass, field
from functools import cache, wraps
from importlib import import_module
from importlib.util import find_spec
from types import MappingProxyType
from typing import Any

from opentelemetry import context as otel

from agentrl.runners.tracing import attempt_log
from agentrl.runners.tracing.attempt_log import AttemptLog, Place

QUEUES = (asyncio.Queue, queue.Queue)
SHARED = "_agentrl_shared"  # attribute of a queue


@dataclass(slots=True, eq=False)
class Shared:
    """Bookkeeping of a queue into which attempts have put items."""

    senders: set[str] = field(default_factory=set)  # attempts; two suffice
    waiting: dict[int, str] = field(
        default_factory=dict
    )  # id of an item -> the attempt that has put it
    lends: bool = False  # whether an item was put back by its taker, as into a pool


TakenFrom = Mapping[Shared, bool]
# The queues from which this task or thread has tried to take an item, and whether it got one. A
# queue is removed when the task or thread puts an item into it.
_taken_from: ContextVar[TakenFrom] = ContextVar("asked", default=MappingProxyType({}))
_putter: ContextVar[Place | None] = ContextVar(
    "putter", default=None
)  # where the last item was put


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
    if find_spec("uvicorn"):  # also covers an application's background workers
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
        leave_as_server()
        return connection

    return accepted


def _sock_accept(accept: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(accept)
    async def accepted(*args: Any) -> Any:
        connection = await accept(*args)
        leave_as_server()
        return connection

    return accepted


def _put(put: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(put)
    def sent(self: Any, *args: Any, **kwargs: Any) -> Any:
        queues, log = _taken_from.get(), attempt_log.current()
        if queues or log is not None:
            _note(_shared(self), queues, log, args[0] if args else kwargs.get("item"))
        return put(self, *args, **kwargs)

    return sent


def _note(shared: Shared, queues: TakenFrom, log: AttemptLog | None, item: Any) -> None:
    """Record that an item is put into a queue; it may be one that was taken out of it before."""
    if back := shared in queues:
        shared.lends = True
        _taken_from.set({queue: taken for queue, taken in queues.items() if queue is not shared})
    if log is None:
        return
    _putter.set(attempt_log.place())
    if len(shared.senders) < 2:
        shared.senders.add(log.attempt)
    if not back and item is not None:  # None: a placeholder of pools; the taker makes the item
        shared.waiting[id(item)] = log.attempt


def _get(get: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(get)
    def taken(self: Any, *args: Any, **kwargs: Any) -> Any:
        try:
            item = get(self, *args, **kwargs)
        except (queue.Empty, asyncio.QueueEmpty):  # it may now make an item, and put that "back"
            if attempt_log.current() is not None:
                _taken_from.set({_shared(self): False, **_taken_from.get()})
            raise
        _leave_if_foreign(self, item)
        return item

    return taken


def _receive(receive: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(receive)
    async def received(self: Any) -> Any:
        item = await receive(self)
        _leave_if_foreign(self, item)
        return item

    return received


def _leave_if_foreign(end: Any, item: Any) -> None:
    """Leave the attempt if the caller works for other attempts: if it repeatedly takes from a queue
    into which others have put, or if the first item that it takes is another attempt's. It stays if
    it puts back what it has taken, like users of a connection pool. It also stays after its first
    item if it has put anything into any queue, because the item may be an answer that another
    attempt's client has received for it."""
    log = attempt_log.current()
    shared = _shared(end) if log is not None else vars(_queue_of(end)).get(SHARED)
    sender = shared.waiting.pop(id(item), None) if shared is not None else None
    if log is None:
        return
    queues = _taken_from.get()
    if queues.get(shared):
        foreign = not shared.senders <= {log.attempt}
    else:
        _taken_from.set({**queues, shared: True})
        foreign = sender not in (None, log.attempt) and not shared.lends
        foreign = foreign and _putter.get() != attempt_log.place()
    if foreign:
        leave_as_server()


def _shared(end: Any) -> Shared:
    attributes: dict[str, Any] = vars(_queue_of(end))
    shared: Shared | None = attributes.get(SHARED)
    return attributes.setdefault(SHARED, Shared()) if shared is None else shared


def _queue_of(end: Any) -> Any:
    """The queue itself, or the state that both ends of an anyio stream share."""
    return end if isinstance(end, QUEUES) else end._state


def leave_as_server() -> None:
    """Detach the caller's task or thread from its attempt permanently, unless it is the agent's
    own: it serves connections, perhaps of other attempts."""
    if log := attempt_log.current():
        thread, task = attempt_log.place()
        if log.homes.isdisjoint({(thread, task), (thread, attempt_log.NO_TASK)}):
            otel.attach(otel.Context())
