"""A dialect: how a model API reports errors, and its translation to chat completions, if any."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Protocol

import msgspec

from agentrl.core.types import Json
from agentrl.runners.apis.chat import Body, ConversationMemory


class UntranslatableError(Exception):
    """The API itself would reject the request, or a chat completion cannot express it."""

    def __init__(self, param: str, why: str, *, status: int = 400, code: str = "") -> None:
        super().__init__(f"{param}: {why}")
        self.message, self.param, self.status = f"{param}: {why}", param, status
        self.code = code or "unsupported_parameter"


class Translation(Protocol):
    """One call of an API that policy servers do not have. A response that is not a chat completion
    raises KeyError, TypeError, ValueError or AttributeError."""

    chat: Body  # the request to the policy server
    ignored: list[str]  # options of the request that have no effect

    @property
    def begun(self) -> bool:
        """Whether a part of a response was read, so that this object cannot be used for another
        one."""

    def whole(self, completion: Body, prompt_tokens: int) -> bytes:
        """Convert a complete response of the policy server."""

    def part(self, chunk: Body, prompt_tokens: int) -> bytes:
        """Return the server-sent events of a chunk, possibly none."""

    def end(self) -> bytes:
        """Return the events that follow the last chunk."""


@dataclass(frozen=True, slots=True)
class Dialect:
    """The format of one call: reading, answering and reporting errors."""

    api: str  # path at the policy server, below its base URL
    error: Callable[[int, str, str], Body]  # (HTTP status, code, message) -> body
    translate: Callable[[Body, ConversationMemory], Translation] | None = None  # None: no change
    reports_errors: bool = False  # an error after the start of a stream is its last event


@contextmanager
def typed() -> Iterator[None]:
    """Refuse the request if the code inside fails on a field of the wrong type."""
    try:
        yield
    except (AttributeError, LookupError, TypeError, ValueError) as error:
        why = f"a field is not of its type ({error})"
        raise UntranslatableError("request", why, code="invalid_type") from None


def objects(value: Json, where: str) -> list[Body]:
    """Return `value` if it is a list of objects, an empty list for None; reject anything else."""
    if value is None:
        return []
    if not isinstance(value, list) or not all(isinstance(item, dict) for item in value):
        raise UntranslatableError(where, "is not a list of objects", code="invalid_type")
    return value


def text(value: Json, where: str) -> str:
    if not isinstance(value, str):
        raise UntranslatableError(where, "is not a string", code="invalid_type")
    return value


def joined(parts: Json, where: str) -> str:
    """Return the concatenated text of parts; refuse parts without text."""
    return "".join(text(part.get("text"), where) for part in objects(parts, where))


def data_event(body: Body) -> bytes:
    return b"data: " + msgspec.json.encode(body) + b"\n\n"


def error(status: int, code: str, message: str) -> Body:
    """https://platform.openai.com/docs/guides/error-codes"""
    server = "server_error" if status >= 500 else "invalid_request_error"
    kind = "rate_limit_error" if status == 429 else server
    return {"error": {"message": message, "type": kind, "param": None, "code": code}}


# The APIs that policy servers implement themselves.
CHAT = Dialect("chat/completions", error)
TEXT = Dialect("completions", error)
