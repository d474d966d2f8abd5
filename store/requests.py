"""Requests: the answer to a call made under a key is kept by the transaction that executed it.

Always true: within `KEPT` seconds a request is executed once, however often it is repeated and
whichever servers died meanwhile; what was refused left nothing behind, so its repeat is executed.
Who may write: the verbs that `answer_once` wraps: those whose answer depends on the state before.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from contextvars import ContextVar, copy_context
from dataclasses import dataclass
from typing import Any, TypeVar

import msgspec

from agentrl.errors import Conflict
from agentrl.store import queries
from agentrl.store.writer import Transaction, WriteVerb

SQL = queries.load("requests")
KEPT = 86_400.0  # seconds
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class IdempotentCall:
    """`id` is the caller's; `digest` that of the arguments, by which a reused id is found out."""

    id: str
    digest: str


CURRENT: ContextVar[IdempotentCall | None] = ContextVar("request", default=None)


def start_call(request: IdempotentCall, call: Coroutine[Any, Any, T]) -> asyncio.Task[T]:
    """Executes a verb of a store as that request."""
    context = copy_context()
    context.run(CURRENT.set, request)
    return asyncio.get_running_loop().create_task(call, context=context)


def answer_once(verb: WriteVerb[T], reply: type[T]) -> WriteVerb[T]:
    """The verb as the present request, if there is one, executes it. Raises Conflict for a request
    whose id was used with other arguments."""
    request = CURRENT.get()
    if request is None:
        return verb

    def execute(tx: Transaction) -> T:
        tx.conn.execute(SQL["lock_request"], {"id": request.id})
        known = tx.conn.execute(SQL["request"], (request.id,)).fetchone()
        if known is None:
            result = verb(tx)
            tx.conn.execute(SQL["forget_requests"], (tx.now - KEPT,))
            text = msgspec.json.encode(result).decode()
            columns = {"id": request.id, "digest": request.digest, "reply": text, "at": tx.now}
            tx.conn.execute(SQL["add_request"], columns)
            return result
        if known["digest"] != request.digest:
            raise Conflict("This idempotency-key was used for a call with other arguments.")
        return msgspec.json.decode(known["reply"], type=reply)

    return execute
