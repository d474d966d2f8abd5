"""A policy server's response: its body or events, its tokens, and its failures.

Fields that the agent did not request are removed, so the agent sees the same as with the real API.
"""

from __future__ import annotations

import contextlib
from array import array
from codecs import BOM_UTF8
from collections.abc import AsyncIterator, Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import aiohttp
import msgspec
from aiohttp import web
from msgspec import Struct

from agentrl.core.types import Json, Transition, float32, int32
from agentrl.runners.apis.chat import ToolCalls
from agentrl.runners.gateway.refusals import MALFORMED, UpstreamError, error_in, malformed
from agentrl.runners.gateway.request import Fields, ModelRequest, forwarded, storable, value

if TYPE_CHECKING:
    from agentrl.runners.gateway.upstream import Route, SentCall

Headers = Mapping[str, str]
# A translation reads more of a completion than parsing checks, so it may fail at either's fault.
NO_TRANSLATION = "cannot be translated; if it is a valid completion, this is a bug of agentrl"
MAX_REFUSAL_LENGTH = 500  # bytes kept of a refusal
SPANS = "agentrl_spans"  # choice field: (first token, version), if several versions sampled it
MAX_ANSWER_BYTES = 64 * 2**20  # bytes of a response that is not streamed, or of one event
MAX_STREAM_BYTES = 4 * MAX_ANSWER_BYTES  # bytes of all events of a stream
EVENT_FIELDS = (b":", b"data", b"event", b"id", b"retry")  # starts of an event's lines
_fields = msgspec.json.Decoder(dict[str, msgspec.Raw])
_choices = msgspec.json.Decoder(list[dict[str, msgspec.Raw]] | None)
_ids = msgspec.json.Decoder(list[int] | None)
_spans = msgspec.json.Decoder(list[tuple[int, int]] | None)
_object = msgspec.json.Decoder(dict[str, Any] | None)


class _Token(msgspec.Struct, gc=False):  # hundreds per call, which would trigger the collector
    logprob: float


class _Logprobs(msgspec.Struct):
    """The logprobs of a chat completion or a completion."""

    content: list[_Token] | None = None
    token_logprobs: list[float] | None = None


_logprobs = msgspec.json.Decoder(_Logprobs | None)


@dataclass(slots=True)
class ResponseChunk:
    """A complete response or a chunk of one, with values not yet decoded."""

    fields: Fields
    choices: list[Fields]

    @property
    def may_be_error(self) -> bool:
        return not self.choices or "error" in self.fields

    def encode_for(self, request: ModelRequest) -> bytes:
        """Encode it without fields that the agent did not request."""
        fields = self.fields | {"model": request.model}
        if not request.asks_token_ids:
            fields.pop("prompt_token_ids", None)
        for choice in self.choices:
            choice.pop(SPANS, None)
            if not request.asks_token_ids:
                choice.pop("token_ids", None)
                choice.pop("prompt_token_ids", None)
            if not request.asks_logprobs and "logprobs" in choice:
                choice["logprobs"] = None
        if "choices" in fields:
            fields["choices"] = self.choices
        return msgspec.json.encode(fields)


def read_chunk(raw: bytes) -> ResponseChunk:
    """Parse a response or a chunk. Raises msgspec.DecodeError if it is not a completion."""
    fields = _fields.decode(raw)
    return ResponseChunk(fields, _choices.decode(fields.get("choices", b"null")) or [])


@dataclass(slots=True)
class SampledChoice:
    """One sampled completion, complete once `finish` is set."""

    prompt: array[int] = field(default_factory=int32)
    tokens: array[int] = field(default_factory=int32)
    logprobs: array[float] = field(default_factory=float32)
    has_token_ids: bool = False  # whether the server returned token ids
    message: dict[str, Json] = field(default_factory=dict)
    finish: str | None = None
    spans: list[tuple[int, int]] = field(default_factory=list)
    inexact: str = ""  # why the exact tokens are unknown
    calls: ToolCalls | None = None  # tool calls of a stream, once a part has one

    @property
    def exact(self) -> bool:
        """Whether the prompt and each sampled token with its log-prob are known."""
        counted = len(self.tokens) == len(self.logprobs)
        return self.has_token_ids and bool(self.prompt) and counted and not self.inexact

    @property
    def has_content(self) -> bool:
        return any(content for name, content in self.message.items() if name != "role")

    def add_tokens(self, data: Fields, prompt: array[int]) -> None:
        """Add the token ids and log-probs of a part. `prompt`: of the whole response so far."""
        ids = _ids.decode(data.get("prompt_token_ids", b"null"))
        self.prompt = int32(ids) if ids else prompt or self.prompt
        ids = _ids.decode(data.get("token_ids", b"null"))
        if ids is not None:
            self.has_token_ids = True
            self.tokens.extend(ids)
        self.spans = _spans.decode(data.get(SPANS, b"null")) or self.spans
        try:
            logprobs = _logprobs.decode(data.get("logprobs", b"null"))
        except msgspec.DecodeError as error:  # null for a token, or a list, from some servers
            self.inexact = self.inexact or f"its log-probs are not readable: {error}"
        else:
            if logprobs is not None:
                self.logprobs.extend(logprobs.token_logprobs or ())
                self.logprobs.extend([token.logprob for token in logprobs.content or ()])

    def add_message(self, data: Fields) -> None:
        """Merge a complete message or a streamed delta into the message so far."""
        message = self.message
        if "text" in data:  # completions
            message["role"] = "assistant"
            message["content"] = message.get("content", "") + (value(data, "text") or "")
        update = _object.decode(data.get("message") or data.get("delta") or b"null") or {}
        for key, delta in update.items():
            if key == "tool_calls" and "delta" in data:
                self.calls = self.calls or ToolCalls()
                for part in delta or ():
                    self.calls.add(part)
                message[key] = self.calls.all
            elif key != "role" and isinstance(so_far := message.get(key), str | dict):
                message[key] = _joined(so_far, delta)
            elif delta is not None or key not in message:
                message[key] = delta

    def transition(self, version: int | None = None, **common: Any) -> Transition:
        """Convert to the stored record, marked inexact without exact token ids. `version`: sampled
        the first token, unless the choice has version spans."""
        return Transition(
            prompt=self.prompt,
            completion=self.tokens,
            logprobs=self.logprobs if self.exact else float32(),
            finish=self.finish or "stop",
            exact=self.exact,
            answer=storable(self.message),
            version=self.spans[0][1] if self.spans else version,
            spans=self.spans if self.exact and len(self.spans) > 1 else [],
            **common,
        )


def _joined(so_far: Json, more: Json) -> Json:
    """A value of a streamed message after a delta, such as a `function_call`."""
    if isinstance(so_far, str) and isinstance(more, str):
        return so_far + more
    if isinstance(so_far, dict) and isinstance(more, dict):
        return so_far | {key: _joined(so_far.get(key), value) for key, value in more.items()}
    return so_far if more is None else more


@dataclass(slots=True)
class ModelResponse:
    """A response under assembly, from one part or from the chunks of a stream."""

    inexact: str = ""  # why the sampled tokens are unknown
    choices: dict[int, SampledChoice] = field(default_factory=dict)
    prompt: array[int] = field(default_factory=int32)

    @property
    def begun(self) -> bool:
        """Whether there is anything that the agent can read."""
        return any(
            choice.tokens or choice.has_content or choice.finish for choice in self.choices.values()
        )

    def add(self, part: ResponseChunk, *, begun: bool = False) -> bool:
        """Add one part; return whether it ends a choice or follows its end: such a part must not
        reach the agent before the response is stored. `begun`: whether the agent has read a part of
        the response, so that it gets the rest even if the token ids are unreadable.

        Raises msgspec.DecodeError, OverflowError, TypeError or AttributeError if the part is not a
        completion."""
        touched = [(self._choice(value(data, "index") or 0), data) for data in part.choices]
        for choice, data in touched:
            choice.add_message(data)
            choice.finish = value(data, "finish_reason") or choice.finish
        try:
            if ids := _ids.decode(part.fields.get("prompt_token_ids", b"null")):
                self.prompt = int32(ids)
            for choice, data in touched:
                choice.add_tokens(data, self.prompt)
        except (msgspec.DecodeError, OverflowError) as error:
            if not begun:
                raise
            for choice in self.choices.values():
                choice.inexact = choice.inexact or f"its token ids are not readable: {error}"
        about = [choice for choice, _ in touched] or self.choices.values()
        return any(choice.finish for choice in about)

    def _choice(self, index: int) -> SampledChoice:
        if index not in self.choices:
            self.choices[index] = SampledChoice(inexact=self.inexact)
        return self.choices[index]

    def cut(self, finish: str) -> None:
        """End the choices that have begun; no further part follows."""
        begun = {i: c for i, c in self.choices.items() if c.finish or c.tokens or c.has_content}
        for choice in begun.values():
            choice.finish = choice.finish or finish
            if not choice.tokens:  # text may arrive before its tokens
                choice.has_token_ids = False
        self.choices = begun

    @property
    def complete(self) -> bool:
        return bool(self.choices) and all(choice.finish for choice in self.choices.values())


@contextlib.contextmanager
def parsing(route: Route, raw: bytes, what: str = "is not a completion") -> Iterator[None]:
    """Convert the errors of parsing the server's response to UpstreamError."""
    try:
        yield
    except MALFORMED as error:
        excerpt = raw[:200].decode(errors="replace")
        raise malformed(
            route, f"what {what} ({type(error).__name__}: {error}): {excerpt}"
        ) from None


async def read(answer: aiohttp.ClientResponse) -> bytes:
    """Read the body of a response. Raises UpstreamError if it is too large."""
    parts = [part async for part in _limited(answer, MAX_ANSWER_BYTES)]
    return (parts[0] if len(parts) == 1 else b"".join(parts)).removeprefix(BOM_UTF8)


async def _limited(answer: aiohttp.ClientResponse, limit: int) -> AsyncIterator[bytes]:
    size = 0
    async for part in answer.content.iter_any():
        size += len(part)
        if size > limit:
            raise _too_large(f"the policy server at {answer.url} sent an answer", limit)
        yield part


def _too_large(what: str, limit: int) -> UpstreamError:
    message = f"{what} of more than {limit} bytes, which is the most that the gateway reads"
    return UpstreamError(f"{message}; limit max_tokens or n", final=True)


def read_event(event: bytes) -> tuple[bytes, bytes]:
    """Split a server-sent event into its other lines and its data. Anything that is not an event,
    such as the bare JSON of an error, is data."""
    lines = event.split(b"\n")
    data = [line[5:] for line in lines if line.startswith(b"data:")]
    other_lines = [line + b"\n" for line in lines if line and not line.startswith(b"data:")]
    if not data and not all(line.startswith(EVENT_FIELDS) for line in other_lines):
        return b"", event.strip()
    return b"".join(other_lines), b"\n".join(data).strip()


def stream(answer: aiohttp.ClientResponse) -> AsyncIterator[bytes]:
    """Iterate over the events of a response. Raises UpstreamError if it is too large."""
    return events(_limited(answer, MAX_STREAM_BYTES))


async def events(chunks: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    """Split a stream into server-sent events, each with its closing blank line, without the byte
    order mark before the first.

    Raises UpstreamError for an event that is too large."""
    buffer, pending = b"", b""  # pending: a "\r" that may belong to a "\r\n"
    mark = BOM_UTF8
    async for chunk in chunks:
        if pending or b"\r" in chunk:
            chunk = pending + chunk
            pending = b"\r" if chunk.endswith(b"\r") else b""
            chunk = chunk.removesuffix(b"\r").replace(b"\r\n", b"\n")
        buffer += chunk
        *complete, buffer = buffer.split(b"\n\n")
        if len(buffer) > MAX_ANSWER_BYTES:
            raise _too_large("a policy server sent an event", MAX_ANSWER_BYTES)
        for event in complete:
            yield event.removeprefix(mark) + b"\n\n"
            mark = b""
    if buffer.strip():
        yield buffer.removeprefix(mark) + pending


class AnsweredCall(Struct, frozen=True):
    """A call with the server's response, which grows while it is streamed."""

    sent: SentCall
    response: ModelResponse
    headers: Headers

    @property
    def request(self) -> ModelRequest:
        return self.sent.call.request


class DisconnectedError(Exception):
    """The agent closed its connection before the response was complete."""


class Delivery:
    """Delivers a response to the agent. `begun`: a byte was sent, perhaps of a comment, so status
    and headers are fixed. `shown`: a byte of the model's output was sent, so the call is not
    retried, and the part that the agent got must be stored."""

    def __init__(self, http: web.Request) -> None:
        self._http, self.response = http, web.StreamResponse()
        self.begun = self.shown = False

    async def send(self, data: bytes, headers: Headers) -> web.StreamResponse:
        try:
            if not self.begun:
                self.begun = True
                self.response.headers.extend(forwarded(headers))
                await self.response.prepare(self._http)
            await self.response.write(data)
        except ConnectionError as error:
            raise DisconnectedError from error
        return self.response

    def abort(self) -> web.StreamResponse:
        """Close the connection in the middle of the response."""
        if self._http.transport is not None:
            self._http.transport.abort()
        return self.response

    async def relay(self, answered: AnsweredCall, events: AsyncIterator[bytes]) -> bytes:
        """Send a stream but for its end; return that. Nothing is sent before the first event with
        text, since an error may follow events without."""
        response, request, route = answered.response, answered.request, answered.sent.route
        translation, headers = request.translation, answered.headers
        opening = b""  # events before the first with text
        held = []  # events that an agent may interpret as the end of the response
        last = b"no data"
        async for event in events:
            head, data = read_event(event)
            if data == b"[DONE]":
                held.append(b"" if translation else event)
                continue
            if not data:  # a keep-alive comment
                await self.send(event, headers)
                continue
            last = data
            with parsing(route, data):
                part = read_chunk(data)
                if part.may_be_error and (error := error_in(part, route, data, begun=self.shown)):
                    if self.shown and translation is None:
                        await self.send(event, headers)
                    raise error
                final = response.add(part, begun=self.shown)
                body = part.encode_for(request)
            shown = head + b"data: " + body + b"\n\n"
            if translation is not None:
                with parsing(route, data, NO_TRANSLATION):
                    shown = translation.part(msgspec.json.decode(body), len(response.prompt))
            words = response.begun and not final and shown  # text that a translation may hold back
            self.shown = self.shown or bool(words)
            if final:
                held.append(shown)
            elif not self.shown:
                opening += shown
            elif opening or shown:
                await self.send(opening + shown, headers)
                opening = b""
        if not response.complete:
            excerpt = last[:MAX_REFUSAL_LENGTH].decode(errors="replace")
            raise malformed(route, f"half a stream, and last {excerpt}")
        if translation is not None:
            held.append(translation.end())
        return opening + b"".join(held)
