"""Errors of the gateway and of policy servers, and their formats for the agent. A server that fails
after it has begun a stream can only send an event, with the status 200; some proxies send every
error in this way. Such an error is treated like the status that it describes.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import msgspec
from aiohttp import web

from agentrl.core.errors import AgentRLError, Invalid
from agentrl.runners.apis.base import Dialect, UntranslatableError
from agentrl.runners.apis.chat import Body

if TYPE_CHECKING:
    from agentrl.runners.gateway.response import ResponseChunk
    from agentrl.runners.gateway.upstream import Route

TRANSIENT = frozenset({429, 502, 503, 504})
# Errors of parsing a response that is not a completion; msgspec.DecodeError is a ValueError.
MALFORMED = (RecursionError, OverflowError, AttributeError, LookupError, TypeError, ValueError)
UNREADABLE = "invalid_body"
# The gateway has already retried, so the agent's SDK need not.
FINAL = {"x-should-retry": "false"}
LABELS = ("code", "status", "status_code", "type", "error_type")  # fields that name the error
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
UNNAMED = 500  # message of an error without one


class RefusedError(Exception):
    """The gateway rejects a request, for example one without an active attempt."""

    def __init__(self, status: int, code: str, message: str) -> None:
        super().__init__(message)
        self.status, self.code, self.message = status, code, message


@dataclass(eq=False)
class UpstreamError(Exception):
    """The policy server failed a call."""

    code: ClassVar[str] = "model_unavailable"
    message: str
    status: int | None = None  # status of the response, if there is one
    body: bytes = b""
    retry_after: float = 0.0  # seconds
    transient: bool = True  # a later retry may succeed
    final: bool = False  # the call must not be retried


@dataclass(eq=False)
class NotStoredError(UpstreamError):
    """The store failed a call that the policy server has answered."""

    code: ClassVar[str] = "call_not_stored"
    unknown: bool = False  # whether it may have been stored nevertheless


@dataclass(eq=False)
class ServerRefusal(Exception):
    """The policy server refused the call: a mistake of the agent, or a field that capture adds."""

    status: int
    words: bytes  # body of its response


def error_in(
    part: ResponseChunk, route: Route, raw: bytes, *, begun: bool = False
) -> UpstreamError | ServerRefusal | None:
    """Return the error in a response with status 200, or in a chunk of one, with the body `raw`;
    None if it is not an error. `begun`: whether the agent has read a part of the response."""
    if not part.may_be_error:
        return None
    fields = {k: v for k, v in part.fields.items() if k not in ("choices", "usage")}
    if (status := _meant_status(msgspec.json.decode(msgspec.json.encode(fields)))) is None:
        return None
    if begun or is_failure(status):
        return failure(route, route.base_url, status, raw)
    return ServerRefusal(status, raw)


def _meant_status(body: Body) -> int | None:
    """Return the HTTP status that an error object describes; None if it is not an error."""
    error = body.get("error")
    if not error and body.get("object") != "error" and body.get("type") != "error":
        return None
    values = [word.get(name) for word in (error, body) if isinstance(word, dict) for name in LABELS]
    labels = ["".join(filter(str.isalnum, str(label).lower())) for label in values]
    codes = (int(label) for label in labels if label.isdecimal() and 400 <= int(label) < 600)
    words = (MEANINGS[word] for label in labels for word in MEANINGS if word in label)
    return next(codes, None) or next(words, UNNAMED)


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


def is_failure(status: int) -> bool:
    """Whether a status other than 200 is not the agent's fault."""
    return 300 <= status < 400 or status in (401, 403, 429) or status >= 500


def failure(
    route: Route, url: str, status: int, words: bytes, retry_after: str = ""
) -> UpstreamError:
    """Build the error for a response with the status of a failure, and the body `words`."""
    if status < 400 or status in (401, 403):
        return UpstreamError(
            f"the endpoint {route.policy!r} at {url} answered {status}; correct its"
            " base_url or its API key",
            final=True,
        )
    excerpt = words[:500].decode(errors="replace")
    return UpstreamError(
        f"the policy server at {url} answered {status}: {excerpt}",
        status=status,
        body=words,
        retry_after=float(retry_after) if retry_after.isdecimal() else 0.0,
        transient=status in TRANSIENT,
    )


def malformed(route: Route, what: str) -> UpstreamError:
    return UpstreamError(f"the policy server at {route.base_url} sent {what}", transient=False)


REPORTED: tuple[type[BaseException], ...] = (
    *(RefusedError, UntranslatableError, UpstreamError, AgentRLError),
    *(msgspec.DecodeError, UnicodeDecodeError, RecursionError),
    *(web.HTTPException, web.RequestPayloadError),
)
"""Errors that are reported to an agent; any other is a bug."""


def error_response(
    request: web.Request, error: BaseException, dialect: Dialect, answered: Iterable[str]
) -> web.Response:
    """Return the response for an error of `REPORTED`, in the format of the API that was called.
    answered: every method and path that is."""
    status, code, message = _meaning(request, error, answered)
    words = error.body if isinstance(error, UpstreamError) else b""
    body = translate_error(dialect, status, words) if words else None
    body = body or msgspec.json.encode(dialect.error(status, code, message))
    answer = web.Response(status=status, body=body, content_type="application/json", headers=FINAL)
    if code == UNREADABLE:
        # The end of this request is unknown, so the connection cannot be reused.
        answer.force_close()
    return answer


def _meaning(
    request: web.Request, error: BaseException, answered: Iterable[str]
) -> tuple[int, str, str]:
    """Return status, code and message of an error."""
    match error:
        case RefusedError() | UntranslatableError():
            return error.status, error.code, error.message
        case UpstreamError():
            return error.status or 502, error.code, error.message
        case msgspec.DecodeError() | UnicodeDecodeError() | RecursionError():
            return 400, "invalid_json", f"the request body is not a JSON object: {error}"
        case web.RequestPayloadError():
            encoding = request.headers.get("content-encoding", "identity")
            why = f"does not decompress or has no end (encoding {encoding!r:.80})"
            return 400, UNREADABLE, f"the request body {why}"
        case Invalid():
            return 400, "invalid_request", str(error)
        case AgentRLError():
            return 503, "unavailable", str(error)
        case web.HTTPRequestEntityTooLarge():
            return 413, "too_large", str(error.text)
        case web.HTTPRequestTimeout():
            return 408, "request_timeout", str(error.text)
    assert isinstance(error, web.HTTPException)
    why = f"{request.method} {request.path}: {error.reason}; there is {', '.join(answered)}"
    return error.status, "unknown_url", why
