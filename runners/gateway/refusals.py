"""What a policy server's errors mean, wherever it says them, and how the agent reads them.

A server that fails after it has begun a stream can only send an event, under the status 200; some
proxies answer every error so. Such an error is treated as the status that it means.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass

import msgspec

from agentrl.runners.dialects import Dialect
from agentrl.runners.dialects.base import Body
from agentrl.runners.gateway.capture import ResponseChunk
from agentrl.runners.gateway.routing import Route
from agentrl.runners.gateway.upstream import UpstreamError, failure, is_failure

# Errors of parsing a response that is not a completion; msgspec.DecodeError is a ValueError.
MALFORMED = (RecursionError, OverflowError, AttributeError, LookupError, TypeError, ValueError)
LABELS = ("code", "status", "status_code", "type", "error_type")  # fields that say what is wrong
# Part of a label, without separators -> HTTP status, in order of precedence.
MEANINGS = {"ratelimit": 429, "toomany": 429, "exhausted": 429, "quota": 429, "overloaded": 503}
MEANINGS |= {"unavailable": 503, "timeout": 504, "deadline": 504, "gateway": 502}
MEANINGS |= {
    "apikey": 401,
    "authenti": 401,
    "unauthorized": 401,
    "permission": 403,
    "forbidden": 403,
}
MEANINGS |= {"notfound": 404, "unprocessable": 422, "badrequest": 400, "invalid": 400}
MEANINGS |= {"contextlength": 400}
UNNAMED = 500  # of an error that says nothing else


@dataclass(eq=False)
class ServerRefusal(Exception):
    """The policy server refused the call: a mistake of the agent, or a field that capture adds."""

    status: int
    words: bytes  # of its response


def error_in(
    part: ResponseChunk, route: Route, raw: bytes, *, begun: bool = False
) -> UpstreamError | ServerRefusal | None:
    """Return the error that a response with status 200 or a chunk of one is, with the body `raw`.
    `begun`: the agent has read a part of the response."""
    if part.choices and "error" not in part.fields:
        return None
    fields = {k: v for k, v in part.fields.items() if k not in ("choices", "usage")}
    if (status := _meant_status(msgspec.json.decode(msgspec.json.encode(fields)))) is None:
        return None
    if begun or is_failure(status):
        return failure(route, route.base_url, status, raw)
    return ServerRefusal(status, raw)


def _meant_status(body: Body) -> int | None:
    """Return the HTTP status that an error means; None if it is none."""
    error = body.get("error")
    if not error and body.get("object") != "error" and body.get("type") != "error":
        return None
    told = [part.get(name) for part in (error, body) if isinstance(part, dict) for name in LABELS]
    labels = ["".join(filter(str.isalnum, str(label).lower())) for label in told]
    codes = (int(label) for label in labels if label.isdecimal() and 400 <= int(label) < 600)
    words = (MEANINGS[part] for label in labels for part in MEANINGS if part in label)
    return next(codes, None) or next(words, UNNAMED)


@contextlib.contextmanager
def parsing(route: Route, raw: bytes) -> Iterator[None]:
    """Convert parse errors of the server's response to UpstreamError."""
    try:
        yield
    except MALFORMED as error:
        said = raw[:200].decode(errors="replace")
        raise malformed(route, f"what is not a completion ({error}): {said}") from None


def malformed(route: Route, what: str) -> UpstreamError:
    return UpstreamError(f"the policy server at {route.base_url} sent {what}", transient=False)


def translate_error(dialect: Dialect, status: int, body: bytes) -> bytes:
    """Return a policy server's error body for the agent: unchanged if both use the same API, else
    its message in the agent's format."""
    try:
        error = msgspec.json.decode(body, type=dict[str, dict[str, msgspec.Raw]])["error"]
        message = msgspec.json.decode(error["message"], type=str)
    except MALFORMED:
        message = body[:2000].decode(errors="replace")
    else:
        if dialect.translate is None:
            return body
    return msgspec.json.encode(dialect.error(status, "upstream_refused", message))
