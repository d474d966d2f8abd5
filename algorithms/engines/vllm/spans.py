"""Which version sampled which token: middleware in a vLLM server whose weights change in flight.

vLLM has no versions by token. Who changes its weights pauses it before, and names the new version
in /resume: at that moment no token is sampled, and vLLM's output processor has every token that
was. Always true: the answer of a call that crossed an update has `agentrl_spans`, as the embedded
server's (see `engines/base`). Calls name the version they begin with in a header.
"""

from __future__ import annotations

import re
from collections.abc import Awaitable, Callable, MutableMapping
from dataclasses import dataclass, field
from typing import Any
from uuid import uuid4

import msgspec

from agentrl.algorithms.engines.base import VERSION_HEADER, parse_versions

RESUME, SPANS = "/resume", "/agentrl/spans"  # the second is answered where this middleware is
CALLS = "/v1/chat/completions", "/v1/completions"
REQUEST = re.compile(r"(?:chatcmpl|cmpl)-(\w+?)(?:[-_](\d+))?")  # vLLM's id: ours, its prompt
REPLACED = {b"x-request-id", b"content-length", VERSION_HEADER.encode()}  # headers of a call
DATA = b"data: "  # before each event of a stream

AsgiMessage = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[AsgiMessage]]
Send = Callable[[AsgiMessage], Awaitable[None]]
AsgiApp = Callable[[MutableMapping[str, Any], Receive, Send], Awaitable[None]]
VersionSpans = list[tuple[int, int]]  # each version with its first token


@dataclass(slots=True)
class _Call:
    version: int  # it begins with
    choices: dict[int, VersionSpans] = field(default_factory=dict)  # that crossed an update


class SpanMiddleware:
    """ASGI middleware around vLLM's server."""

    def __init__(self, app: AsgiApp) -> None:
        self._app = app
        self._calls: dict[str, _Call] = {}  # by request id

    async def __call__(self, scope: MutableMapping[str, Any], receive: Receive, send: Send) -> None:
        path, headers = scope.get("path"), dict(scope.get("headers", ()))
        version = headers.get(VERSION_HEADER.encode())
        if path in CALLS and version is not None:
            await self._serve(int(version), scope, receive, send)
        elif path == SPANS:
            await answer(send, 200, b"{}")
        else:
            if path == RESUME and scope["query_string"]:
                engine = scope["app"].state.engine_client
                versions = parse_versions(scope["query_string"].decode())
                self._change(engine.output_processor.request_states.values(), versions[""])
            await self._app(scope, receive, send)

    def _change(self, requests: Any, version: int) -> None:
        """The tokens that each of vLLM's requests has not sampled yet are of this version."""
        for request in requests:
            named = REQUEST.fullmatch(request.external_req_id)
            if named is None or (call := self._calls.get(named[1])) is None:
                continue
            n = request.parent_req.sampling_params.n if request.parent_req else 1
            index = int(named[2] or 0) * n + request.request_index
            spans = call.choices.setdefault(index, [(0, call.version)])
            sampled = request.detokenizer.num_output_tokens()
            if spans[-1][0] == sampled:  # the version before sampled none
                spans.pop()
            if not spans or spans[-1][1] != version:
                spans.append((sampled, version))

    async def _serve(
        self, version: int, scope: MutableMapping[str, Any], receive: Receive, send: Send
    ) -> None:
        id, call = uuid4().hex, _Call(version)
        headers = [header for header in scope["headers"] if header[0] != b"x-request-id"]
        start: AsgiMessage = {}
        body = b""

        async def send_with_spans(message: AsgiMessage) -> None:
            nonlocal body
            if message["type"] == "http.response.start":
                start.update(message, headers=list(message["headers"]))
                return
            body += message.get("body", b"")
            stream = any(value.startswith(b"text/event-stream") for _, value in start["headers"])
            if message.get("more_body") and not stream:
                return
            known = _add_spans(body, call.choices)
            if start.pop("type", None):
                length = b"content-length"
                sized = [(k, b"%d" % len(known) if k == length else v) for k, v in start["headers"]]
                await send({**start, "type": "http.response.start", "headers": sized})
            body = b""
            await send({**message, "body": known})

        self._calls[id] = call
        try:
            added = [*headers, (b"x-request-id", id.encode())]
            await self._app({**scope, "headers": added}, receive, send_with_spans)
        finally:
            del self._calls[id]


def _add_spans(body: bytes, choices: dict[int, VersionSpans]) -> bytes:
    """An answer, or events of a streamed one, with the spans of each choice where it ends."""
    if not choices:
        return body
    if body.startswith(DATA):
        events = [event.removeprefix(DATA) for event in body.split(b"\n\n")]
        return b"\n\n".join(event and DATA + _add_spans(event, choices) for event in events)
    try:
        answer = msgspec.json.decode(body, type=dict[str, Any])
    except msgspec.DecodeError:  # an error message, or the end of a stream
        return body
    for choice in answer.get("choices", ()):
        if choice.get("finish_reason") and (spans := choices.get(choice["index"])):
            choice["agentrl_spans"] = spans
    return msgspec.json.encode(answer)


async def answer(send: Send, status: int, body: bytes = b"") -> None:
    """Answer a request oneself."""
    await send({"type": "http.response.start", "status": status, "headers": []})
    await send({"type": "http.response.body", "body": body})
