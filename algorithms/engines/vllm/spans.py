"""Middleware of a vLLM server: which version sampled each token, and what was cut short.

The client that changes vLLM's weights pauses it first, and names the new version here before it
resumes: in between no token is sampled. Since 0.32 vLLM labels tokens with a version itself; its
outputs have the labels, its HTTP answers do not, and the middleware reads them where an output
passes. Before, vLLM's output processor has every token sampled so far when a version is named, and
the middleware counts them there. A call has the version that it was admitted with in a header; if
vLLM accepts it only after the update, because it was on its way or in the tokenizer, it belongs to
the new version alone. Always true: the response of a call that spans an update has
`agentrl_spans`, as the embedded server's (see `engines/base`).

vLLM says `tool_calls` of a whole answer with a call in it even where the token limit ended it, such
as within a second call (a stream says `length`). Always true: an answer that the limit ended says
`length`.
"""

from __future__ import annotations

import re
import sys
from collections.abc import AsyncGenerator, Awaitable, Callable, MutableMapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import parse_qsl
from uuid import uuid4

import msgspec

from agentrl.algorithms.engines.base import VERSION_HEADER

SPANS = "/agentrl/spans"  # exists with this middleware; ?VERSIONS sets the weights' versions
CALLS = "/v1/chat/completions", "/v1/completions"
REQUEST = re.compile(r"(?:chatcmpl|cmpl)-(\w+?)(?:[-_](\d+))?")  # vLLM's id: our id, prompt index
REPLACED = {b"x-request-id", b"content-length", VERSION_HEADER.encode()}  # headers of a call
DATA = b"data: "  # before each event of a stream

AsgiMessage = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[AsgiMessage]]
Send = Callable[[AsgiMessage], Awaitable[None]]
AsgiApp = Callable[[MutableMapping[str, Any], Receive, Send], Awaitable[None]]
VersionSpans = list[tuple[int, int]]  # (first token, version)


def parse_versions(query: str) -> dict[str, int]:
    """Parse a query such as `policy=3&other=0` into versions by policy."""
    return {policy: int(version) for policy, version in parse_qsl(query, keep_blank_values=True)}


@dataclass(slots=True)
class _Call:
    version: int  # at admission
    choices: dict[int, VersionSpans] = field(default_factory=dict)  # choices that span an update
    cut: set[int] = field(default_factory=set)  # choices that the token limit ended


class SpanMiddleware:
    """ASGI middleware around vLLM's server."""

    def __init__(self, app: AsgiApp) -> None:
        self._app = app
        self._calls: dict[str, _Call] = {}  # by request id
        # From the newest request for SPANS; None for adapters, whose calls keep their version.
        self._version: int | None = None
        self._watched: Any = None  # vLLM's client of its engine
        self._processor: Any = None  # its output processor, where outputs have no labels

    async def __call__(self, scope: MutableMapping[str, Any], receive: Receive, send: Send) -> None:
        path, headers = scope.get("path"), dict(scope.get("headers", ()))
        version = headers.get(VERSION_HEADER.encode())
        if path in CALLS and version is not None:
            await self._serve(int(version), scope, receive, send)
        elif path == SPANS:
            if query := scope["query_string"].decode():
                self._version = parse_versions(query).get("")
                await self._name(scope["app"].state.engine_client)
            await answer(send, 200, b"{}")
        else:
            await self._app(scope, receive, send)

    async def _name(self, engine: Any) -> None:
        """Record that the newest version samples the next tokens."""
        if not _labels_tokens(engine):
            for request in self._watch_processor(engine.output_processor).values():
                self._change(request)
        elif self._version is not None:
            await engine.update_weight_version(str(self._version))

    def _watch(self, engine: Any) -> None:
        if not _labels_tokens(engine):
            self._watch_processor(engine.output_processor)
        if engine is not self._watched:
            self._watched, generate = engine, engine.generate

            async def watched(
                prompt: Any, sampling_params: Any, request_id: str, **named: Any
            ) -> AsyncGenerator[Any, None]:
                async with aclosing(
                    generate(prompt, sampling_params, request_id, **named)
                ) as outputs:
                    async for output in outputs:
                        self._note(request_id, sampling_params.n, output.outputs)
                        yield output

            engine.generate = watched

    def _note(self, request_id: str, n: int, completions: Sequence[Any]) -> None:
        """Record how completions end, and their labels, which those have that end."""
        named = REQUEST.fullmatch(request_id)
        if named is None or (call := self._calls.get(named[1])) is None:
            return
        for completion in completions:
            index = int(named[2] or 0) * n + completion.index
            if completion.finish_reason == "length":
                call.cut.add(index)
            if self._version is None:
                continue
            labels = getattr(completion, "weight_versions", None) or ()
            # Weights that nobody has named yet are those that the call was admitted with.
            spans = [
                (label.start, int(label.version) if label.version.isdigit() else call.version)
                for label in labels
            ]
            if any(version != call.version for _, version in spans):
                call.choices[index] = spans

    def _watch_processor(self, processor: Any) -> dict[str, Any]:
        """The requests of vLLM's output processor, which is patched to call `_change` for each that
        it accepts."""
        if processor is not self._processor:
            self._processor, take = processor, processor.add_request

            def add_request(request: Any, *arguments: Any, **named: Any) -> None:
                take(request, *arguments, **named)
                taken = processor.request_states.get(request.request_id)
                if taken is not None:
                    self._change(taken)

            processor.add_request = add_request
        requests: dict[str, Any] = processor.request_states
        return requests

    def _change(self, request: Any) -> None:
        """Record that the newest version samples the next tokens of one of vLLM's requests."""
        version, named = self._version, REQUEST.fullmatch(request.external_req_id)
        if version is None or named is None or (call := self._calls.get(named[1])) is None:
            return
        n = request.parent_req.sampling_params.n if request.parent_req else 1
        index = int(named[2] or 0) * n + request.request_index
        before = call.choices.get(index, [(0, call.version)])
        if before[-1][1] == version:
            return
        sampled = request.detokenizer.num_output_tokens()
        # Drop earlier versions that sampled no token.
        call.choices[index] = [span for span in before if span[0] < sampled] + [(sampled, version)]

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
            whole, body = _completed(body, call), b""
            if start.pop("type", None):
                length = b"content-length"
                sized = [(k, b"%d" % len(whole) if k == length else v) for k, v in start["headers"]]
                await send({**start, "type": "http.response.start", "headers": sized})
            await send({**message, "body": whole})

        self._watch(scope["app"].state.engine_client)
        self._calls[id] = call
        try:
            added = [*headers, (b"x-request-id", id.encode())]
            await self._app({**scope, "headers": added}, receive, send_with_spans)
        finally:
            del self._calls[id]


def _labels_tokens(engine: Any) -> bool:
    """Whether vLLM labels tokens with a version itself. 0.31 takes the name of a version, but its
    outputs have no labels."""
    outputs = sys.modules.get("vllm.outputs")
    fields = getattr(outputs, "CompletionOutput", object)
    has_labels = outputs is None or "weight_versions" in getattr(fields, "__annotations__", {})
    return has_labels and hasattr(engine, "update_weight_version")


def _completed(body: bytes, call: _Call) -> bytes:
    """A response, or the events of a streamed one, whose finished choices have their spans and say
    `length` if they were cut. vLLM's own bytes where that changes nothing."""
    if not call.choices and not call.cut:
        return body
    if body.startswith(DATA):
        events = [event.removeprefix(DATA) for event in body.split(b"\n\n")]
        return b"\n\n".join(event and DATA + _completed(event, call) for event in events)
    try:
        answer = msgspec.json.decode(body, type=dict[str, Any])
    except msgspec.DecodeError:  # an error message, or the end of a stream
        return body
    changed = False
    for choice in answer.get("choices", ()):
        if not (finish := choice.get("finish_reason")):
            continue
        if choice["index"] in call.cut and finish != "length":
            choice["finish_reason"] = "length"
            changed = True
        if spans := call.choices.get(choice["index"]):
            choice["agentrl_spans"] = spans
            changed = True
    return msgspec.json.encode(answer) if changed else body


async def answer(send: Send, status: int, body: bytes = b"") -> None:
    """Send a whole response."""
    await send({"type": "http.response.start", "status": status, "headers": []})
    await send({"type": "http.response.body", "body": body})
