"""Calls that may be repeated: executed only once, with the same reply.

A caller gives a call an id; its reply is stored under it, in the transaction of the call or, for a
verb of several transactions, at its end. So every process of a server knows it, and the next one
too. A claim needs no reply here: its attempts have its id.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine
from contextvars import ContextVar, copy_context
from dataclasses import dataclass
from typing import Any, TypeVar

import msgspec

from agentrl.errors import Conflict
from agentrl.store.sql.database import load_sql
from agentrl.store.sql.writer import Transaction, Writer, WriteVerb

REQUESTS = load_sql("requests")
KEPT = 86_400.0  # seconds for which replies are stored
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class IdempotentCall:
    """`id`: chosen by the caller. `digest`: hash of the arguments; a different one means that the
    id was used for another call."""

    id: str
    digest: str


CURRENT: ContextVar[IdempotentCall | None] = ContextVar("request", default=None)


def start_call(request: IdempotentCall, call: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
    """Execute a verb of a store as this request."""
    context = copy_context()
    context.run(CURRENT.set, request)
    return asyncio.get_running_loop().create_task(call, context=context)


def answer_once(verb: WriteVerb[T], reply: type[T]) -> WriteVerb[T]:
    """Wrap a verb to execute it only once for the current request, if there is one: a repeat gets
    the stored reply. Raises Conflict if the request's id was used with other arguments."""
    request = CURRENT.get()
    if request is None:
        return verb

    def execute(tx: Transaction) -> T:
        if (known := _stored_reply(tx, request)) is not None:
            return msgspec.json.decode(known, type=reply)
        result = verb(tx)
        tx.conn.execute(REQUESTS["forget_requests"], (tx.now - KEPT,))
        text = msgspec.json.encode(result).decode()
        columns = {"id": request.id, "digest": request.digest, "reply": text, "at": tx.now}
        tx.conn.execute(REQUESTS["add_request"], columns)
        return result

    return execute


async def answer_long_once(writer: Writer, verb: Callable[[], Awaitable[T]], reply: type[T]) -> T:
    """Like `answer_once`, for a verb of several transactions. A repeat of a call that did not end
    does what is left."""
    request = CURRENT.get()
    if request is None:
        return await verb()
    known = await writer.post(lambda tx: _stored_reply(tx, request))
    if known is not None:
        return msgspec.json.decode(known, type=reply)
    result = await verb()
    return await writer.post(answer_once(lambda _: result, reply))


def _stored_reply(tx: Transaction, request: IdempotentCall) -> str | None:
    """Return the reply in JSON, None for a new request, of which the id is then locked."""
    tx.conn.execute(REQUESTS["lock_request"], {"id": request.id})
    known = tx.conn.execute(REQUESTS["request"], (request.id,)).fetchone()
    if known is None:
        return None
    if known["digest"] != request.digest:
        raise Conflict("This idempotency-key was used for a call with other arguments.")
    return str(known["reply"])
