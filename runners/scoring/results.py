"""What an agent answered, as JSON, and what went wrong, as data."""

from __future__ import annotations

import traceback
from typing import Any

import msgspec

from agentrl.store.rows import storable_text
from agentrl.types import ErrorKind, Failure, Json

LONGEST_TRACEBACK = 20_000  # characters, from the end


def failure_of(kind: ErrorKind, error: BaseException) -> Failure:
    text, said = storable_text("".join(traceback.format_exception(error))), as_text(error)
    message = f"{type(error).__name__}: {said}" if said else type(error).__name__
    return Failure(kind=kind, message=message, traceback=text[-LONGEST_TRACEBACK:])


def as_json(result: Any) -> Json:
    """`result` as JSON values; what JSON cannot express becomes its text. Never raises."""
    try:
        return msgspec.json.decode(msgspec.json.encode(result, enc_hook=_plain))
    except Exception:  # noqa: BLE001 - objects of the user's agent are a boundary
        return as_text(result)


def json_size(result: Any) -> int:
    """Bytes of `as_json` of a result. Never raises."""
    return len(msgspec.json.encode(as_json(result)))


def as_text(value: object) -> str:
    """`str(value)` as every database stores it, whatever its class does. Never raises."""
    try:
        return storable_text(str(value))
    except Exception:  # noqa: BLE001 - a class of the user's, or an int that is too long
        return f"<{type(value).__name__} that has no text>"


def _plain(value: Any) -> Any:
    dump = getattr(value, "model_dump", None)  # pydantic
    return dump(mode="json") if callable(dump) else str(value)
