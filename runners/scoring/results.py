"""Converts results of agents to JSON, and exceptions to `Failure` records."""

from __future__ import annotations

import traceback
from typing import Any

from agentrl.base.jsonvalues import NotJsonError, as_json
from agentrl.base.user_code import cause_of
from agentrl.store.rows import storable_text
from agentrl.types import ErrorKind, Failure, Json

LONGEST_TRACEBACK = 20_000  # characters, from the end


def failure_of(kind: ErrorKind, error: BaseException) -> Failure:
    error = cause_of(error)
    trace, text = storable_text("".join(traceback.format_exception(error))), as_text(error)
    message = f"{type(error).__name__}: {text}" if text else type(error).__name__
    return Failure(kind=kind, message=message, traceback=trace[-LONGEST_TRACEBACK:])


def stored_result(result: Any, failure: Failure | None) -> tuple[Json, Failure | None]:
    """Convert an agent's result to JSON values, which the verifier sees and the store keeps. One
    that has no JSON form is the agent's failure. Never raises."""
    try:
        return as_json(result), failure
    except NotJsonError as error:
        known = Failure(kind=ErrorKind.AGENT, message=error.at("the agent's result"))
        return None, failure or known


def as_text(value: object) -> str:
    """Return `str(value)` as text that every database can store. Never raises."""
    try:
        return storable_text(str(value))
    except BaseException:  # noqa: BLE001 - a user's class, or an int with too many digits
        return f"<{type(value).__name__} that has no text>"
