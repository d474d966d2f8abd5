"""Converts results of agents to JSON, and exceptions to `Failure` records."""

from __future__ import annotations

import traceback
from typing import Any

import msgspec

from agentrl.store.rows import storable_text
from agentrl.types import ErrorKind, Failure, Json

LONGEST_TRACEBACK = 20_000  # characters, from the end


def failure_of(kind: ErrorKind, error: BaseException) -> Failure:
    trace, text = storable_text("".join(traceback.format_exception(error))), as_text(error)
    message = f"{type(error).__name__}: {text}" if text else type(error).__name__
    return Failure(kind=kind, message=message, traceback=trace[-LONGEST_TRACEBACK:])


def as_json(result: Any) -> Json:
    """Convert `result` to JSON values, other objects to their text. Never raises."""
    try:
        return msgspec.json.decode(msgspec.json.encode(result, enc_hook=_plain))
    except Exception:  # noqa: BLE001 - code of the user's classes may raise anything
        return as_text(result)


def json_size(result: Any) -> int:
    """Return the size of `as_json(result)` in bytes. Never raises."""
    return len(msgspec.json.encode(as_json(result)))


def as_text(value: object) -> str:
    """Return `str(value)` as text that every database can store. Never raises."""
    try:
        return storable_text(str(value))
    except Exception:  # noqa: BLE001 - a user's class, or an int with too many digits
        return f"<{type(value).__name__} that has no text>"


def _plain(value: Any) -> Any:
    dump = getattr(value, "model_dump", None)  # pydantic
    return dump(mode="json") if callable(dump) else str(value)
