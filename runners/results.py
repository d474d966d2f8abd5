"""What an agent answered, as JSON, and what went wrong, as data."""

from __future__ import annotations

import traceback
from typing import Any

import msgspec

from agentrl.types import ErrorKind, Failure, Json

LONGEST_TRACEBACK = 20_000  # characters, from the end


def failure_of(kind: ErrorKind, error: BaseException) -> Failure:
    text = "".join(traceback.format_exception(error))
    message = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
    return Failure(kind=kind, message=message, traceback=text[-LONGEST_TRACEBACK:])


def as_json(result: Any) -> Json:
    """`result` as JSON can say it; what JSON cannot say becomes its text."""
    if result is None or isinstance(result, bool | int | float) or type(result) is str:
        return result
    try:
        return msgspec.json.decode(msgspec.json.encode(result, enc_hook=_plain))
    except (TypeError, ValueError, RecursionError):
        return str(result)


def _plain(value: Any) -> Any:
    dump = getattr(value, "model_dump", None)  # pydantic
    return dump(mode="json") if callable(dump) else str(value)
