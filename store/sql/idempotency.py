"""Calls that may be repeated: executed only once, with the same reply.

Most verbs are idempotent by the ids of their rows, claims too. Where that is not enough the caller
gives the call an id, and its reply is stored under it, in the transaction of the call: every
process of a server knows it, and the next one too.
"""

from __future__ import annotations

from contextvars import ContextVar
from dataclasses import dataclass
from typing import TypeVar

import msgspec

from agentrl.errors import Conflict
from agentrl.store.sql.database import load_sql
from agentrl.store.sql.writer import Transaction, WriteVerb

REQUESTS = load_sql("requests")
REPLIES_KEPT = 86_400.0  # seconds for which replies are stored
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class IdempotentCall:
    """`id`: chosen by the caller. `digest`: hash of the arguments; a different one means that the
    id was used for another call."""

    id: str
    digest: str


CURRENT: ContextVar[IdempotentCall | None] = ContextVar("request", default=None)


def answer_once(verb: WriteVerb[T], reply: type[T]) -> WriteVerb[T]:
    """Wrap a verb to execute it only once for the current request, if there is one: a repeat gets
    the stored reply. Raises Conflict if the request's id was used with other arguments."""
    request = CURRENT.get()
    if request is None:
        return verb

    def execute(tx: Transaction) -> T:
        tx.conn.execute(REQUESTS["lock_request"], {"id": request.id})
        known = tx.conn.execute(REQUESTS["request"], (request.id,)).fetchone()
        if known is None:
            result = verb(tx)
            tx.conn.execute(REQUESTS["forget_requests"], (tx.now - REPLIES_KEPT,))
            text = msgspec.json.encode(result).decode()
            columns = {"id": request.id, "digest": request.digest, "reply": text, "at": tx.now}
            tx.conn.execute(REQUESTS["add_request"], columns)
            return result
        if known["digest"] != request.digest:
            raise Conflict("This idempotency-key was used for a call with other arguments.")
        return msgspec.json.decode(known["reply"], type=reply)

    return execute
