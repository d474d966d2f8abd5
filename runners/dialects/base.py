"""What a dialect is: the shape of an API's errors, and how its calls become chat completions.

Policy servers give exact token ids for chat completions and completions only, so every other API
is translated: the request into a chat completion, the answer back into that API's own objects and
events. Always true: what has a meaning and no equivalent is refused, never left out.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Protocol

import msgspec

from agentrl.types import Json

Body = dict[str, Json]


@dataclass(slots=True)
class ConversationMemory:
    """What later calls of an attempt may refer to."""

    answers: dict[str, list[Body]] = field(default_factory=dict)
    """Conversations by the id of the answer they ended with, as chat messages."""

    arguments: dict[str, str] = field(default_factory=dict)
    """Of tool calls by their id, byte for byte as the model wrote them."""


class UntranslatableError(Exception):
    """A request that its API would refuse, or that a chat completion cannot express."""

    def __init__(self, param: str, why: str, *, status: int = 400, code: str = "") -> None:
        super().__init__(f"{param}: {why}")
        self.message, self.param, self.status = f"{param}: {why}", param, status
        self.code = code or "unsupported_parameter"


class Translation(Protocol):
    """One call on its way through: `chat` is asked, and its answer or chunks are handed back.

    An answer is given whole to `whole`, or chunk by chunk to `part` and then `end`. Answers that
    are no chat completions raise KeyError, TypeError, ValueError or AttributeError."""

    chat: Body

    def whole(self, answer: Body, prompt_tokens: int) -> bytes: ...

    def part(self, chunk: Body, prompt_tokens: int) -> bytes:
        """Server-sent events, maybe none."""
        ...

    def end(self) -> bytes:
        """The last events, after the last chunk."""
        ...


@dataclass(frozen=True, slots=True)
class Dialect:
    route: str  # where agents post, below /v1
    api: str  # where the policy server is asked, below its base URL
    error: Callable[[int, str, str], Body]  # of HTTP status, code and message
    translate: Callable[[Body, ConversationMemory], Translation] | None = None  # None: the same API


@contextmanager
def typed() -> Iterator[None]:
    """What stumbles inside over a field of another type than its API has, refuses the request."""
    try:
        yield
    except (AttributeError, TypeError) as error:
        why = f"a field is not of its type ({error})"
        raise UntranslatableError("request", why, code="invalid_type") from None


def refuse_unless(
    body: Mapping[str, Json], allowed: Mapping[str, tuple[Json, ...]], where: str = ""
) -> None:
    """Refuse the fields of `body`, itself at `where`, that have any but the allowed values."""
    for name, values in allowed.items():
        if name in body and body[name] not in values:
            raise UntranslatableError(
                f"{where}{name}",
                f"{body[name]!r:.80} is not possible behind this gateway; leave it out",
            )


def objects(value: Json, where: str) -> list[Body]:
    """`value` if it is a list of objects; nothing is an empty one."""
    if value is None:
        return []
    if not isinstance(value, list) or not all(isinstance(item, dict) for item in value):
        raise UntranslatableError(where, "is not a list of objects", code="invalid_type")
    return value


def text(value: Json, where: str) -> str:
    if not isinstance(value, str):
        raise UntranslatableError(where, "is not a string", code="invalid_type")
    return value


def event(body: Body) -> bytes:
    """A server-sent event that is named as its `type`."""
    return f"event: {body['type']}\ndata: ".encode() + msgspec.json.encode(body) + b"\n\n"
