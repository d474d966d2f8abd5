"""Adds capture fields to a model call, and reads the tokens of its response.

Adds `return_token_ids` and `logprobs`, plus the rollout's sampling parameters that the agent does
not set. The agent's own fields are passed on byte for byte, except the arguments of tool calls,
which are restored to the model's own text. Fields that the agent did not ask for are removed from
the response, so the agent sees the same as with the real API.
"""

from __future__ import annotations

import json
from array import array
from dataclasses import dataclass, field
from typing import Any

import msgspec

from agentrl.runners.dialects import Dialect, Translation, UntranslatableError
from agentrl.runners.dialects.base import TEXT, ConversationMemory, typed
from agentrl.runners.dialects.tool_calls import ToolCalls
from agentrl.runners.gateway.learnable import processors
from agentrl.runners.gateway.routing import Route
from agentrl.types import Json, Sampling, Transition, float32, int32

Fields = dict[str, Any]
"""A JSON object. Its values are `msgspec.Raw`, the received bytes, or set by the gateway."""

SPANS = "agentrl_spans"  # choice field: (first token, version), if several versions sampled it

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


def value(fields: Fields, name: str) -> Json:
    """Return the decoded value of a field; None if it is missing."""
    found = fields.get(name)
    return _decoded(found) if isinstance(found, msgspec.Raw) else found


def _decoded(raw: msgspec.Raw) -> Json:
    """Decode JSON; numbers that Python cannot read, such as 1e400, as text."""
    try:
        return msgspec.json.decode(raw)
    except msgspec.ValidationError:
        return json.loads(bytes(raw), parse_int=_number_or_text, parse_float=_number_or_text)


def _number_or_text(written: str) -> Json:
    try:
        return msgspec.json.decode(written)
    except msgspec.ValidationError:
        return written


def storable(found: Json) -> Json:
    """Return JSON with integers of more than 64 bits, which the store refuses, as text."""
    try:
        msgspec.msgpack.encode(found)
    except OverflowError:
        return _with_texts(found)
    return found


def _with_texts(found: Json) -> Json:
    if isinstance(found, dict):
        return {name: _with_texts(item) for name, item in found.items()}
    if isinstance(found, list):
        return [_with_texts(item) for item in found]
    wide = isinstance(found, int) and not -(2**63) <= found < 2**64
    return str(found) if wide else found


@dataclass(frozen=True, slots=True)
class ModelRequest:
    """A request of the agent, independent of the server that will answer it."""

    dialect: Dialect
    fields: Fields  # body for the policy server; `model` as the agent named it
    translation: Translation | None
    index: int  # within its attempt
    model: str
    stream: bool
    asks_token_ids: bool  # the agent asked for token ids itself
    asks_logprobs: bool
    messages: list[dict[str, Json]]  # the conversation; a text prompt is one user message
    tools: list[dict[str, Json]]

    @property
    def doubt(self) -> str:
        """Why no response can be recorded exactly; empty if it can."""
        echo = self.dialect is TEXT and value(self.fields, "echo")
        return "its response repeats the prompt (echo)" if echo else ""

    @property
    def left_out(self) -> list[str]:
        """Options of the request that have no effect."""
        return [] if self.translation is None else self.translation.left_out

    @property
    def processors(self) -> dict[str, str]:
        """Options that change the distribution, see `Transition.processors`."""
        return processors(self.fields, self.tools)

    def encode(
        self, route: Route, defaults: Sampling, *, capture: bool, room: int | None = None
    ) -> tuple[bytes, Sampling]:
        """Return the body for the route's server and the effective sampling parameters.

        `defaults`: those of the rollout, with a seed for this call; frozen endpoints keep their
        own. `room`: tokens that fit after the prompt, if the agent asks for more."""
        body = self.fields | {"model": route.model or self.model}
        if capture:
            body["return_token_ids"] = True
            if not self.asks_logprobs:
                body["logprobs"] = 1 if self.dialect is TEXT else True
        sampling = _fill_sampling(body, None if route.frozen else defaults)
        if room:
            body.pop("max_completion_tokens", None)
            body["max_tokens"] = room
            sampling = msgspec.structs.replace(sampling, max_tokens=room)
        return msgspec.json.encode(body), sampling

    def restore_fields(self, part: ResponseChunk) -> bytes:
        """Encode a response or a chunk without the fields that the agent did not ask for."""
        fields = part.fields | {"model": self.model}
        if not self.asks_token_ids:
            fields.pop("prompt_token_ids", None)
        for choice in part.choices:
            choice.pop(SPANS, None)
            if not self.asks_token_ids:
                choice.pop("token_ids", None)
                choice.pop("prompt_token_ids", None)
            if not self.asks_logprobs and "logprobs" in choice:
                choice["logprobs"] = None
        if "choices" in fields:
            fields["choices"] = part.choices
        return msgspec.json.encode(fields)


def read_request(
    dialect: Dialect, raw: bytes, memory: ConversationMemory, index: int
) -> ModelRequest:
    """Parse a request.

    Raises msgspec.DecodeError, UnicodeDecodeError or RecursionError unless it is a JSON object,
    UntranslatableError if it cannot be translated for the policy server."""
    translation = None
    if dialect.translate is None:
        fields: Fields = _fields.decode(raw)
    else:
        body = msgspec.json.decode(raw, type=dict[str, Any])
        with typed():
            translation = dialect.translate(body, memory)
        fields = dict(translation.chat)  # a copy: `restore` below may change it
    stream = value(fields, "stream")
    if stream is not None and not isinstance(stream, bool):
        why = f"{stream!r:.80} is neither true nor false"
        raise UntranslatableError("stream", why, code="invalid_type")
    logprobs, messages, prompt = (value(fields, k) for k in ("logprobs", "messages", "prompt"))
    if memory.restore(messages):  # in place, if translated
        fields["messages"] = messages
    if "messages" not in fields and isinstance(prompt, str):
        messages = [{"role": "user", "content": prompt}]
    return ModelRequest(
        dialect,
        fields,
        translation,
        index=index,
        model=str(value(fields, "model") or ""),
        stream=stream is True,
        asks_token_ids=value(fields, "return_token_ids") is True,
        asks_logprobs=logprobs is not None and logprobs is not False,
        messages=_dicts(messages),
        tools=_dicts(value(fields, "tools")),
    )


def _dicts(found: Json) -> list[dict[str, Json]]:
    """Return the objects of a list, for storing; the policy server refuses anything else."""
    items = [item for item in found if isinstance(item, dict)] if isinstance(found, list) else []
    return list(storable(items))


def _fill_sampling(body: Fields, defaults: Sampling | None) -> Sampling:
    """Set the parameters that the agent does not set, or that are forced, if there are `defaults`;
    return the effective ones."""
    asked = {name: value(body, name) for name in ("temperature", "top_p", "top_k", "seed")}
    limit = value(body, "max_completion_tokens")
    limit = value(body, "max_tokens") if limit is None else limit
    if defaults is not None:
        if limit is None and defaults.max_tokens is not None:
            limit = body["max_tokens"] = defaults.max_tokens
        filling = {"temperature": defaults.temperature, "top_p": defaults.top_p}
        filling |= {"top_k": defaults.top_k} if defaults.top_k else {}
        if defaults.force:
            for name in ("temperature", "top_p", "top_k"):
                body.pop(name, None)
                asked[name] = None
        filling |= {"seed": defaults.seed} if defaults.seed is not None else {}
        for name, default in filling.items():
            if asked[name] is None:
                asked[name] = body[name] = default
    return Sampling(  # the policy server refuses values that are not numbers
        temperature=_number(asked["temperature"], float, 1.0),
        top_p=_number(asked["top_p"], float, 1.0),
        top_k=_number(asked["top_k"], int, 0),
        max_tokens=_number(limit, int, None),
        seed=_number(asked["seed"], int, None),
    )


def _number(given: Json, kind: type, default: Any) -> Any:
    if isinstance(given, bool) or not isinstance(given, int | kind):
        return default
    wide = isinstance(given, int) and given.bit_length() > 63
    return default if wide else kind(given)


@dataclass(slots=True)
class ResponseChunk:
    """A complete response or a chunk of one, with values not yet decoded."""

    fields: Fields
    choices: list[Fields]


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
    known: bool = False  # the server returned token ids
    message: dict[str, Json] = field(default_factory=dict)
    finish: str | None = None
    spans: list[tuple[int, int]] = field(default_factory=list)
    doubt: str = ""  # why its tokens are not known exactly
    calls: ToolCalls = field(default_factory=ToolCalls)

    @property
    def exact(self) -> bool:
        """Whether the prompt and each sampled token with its log-prob are known."""
        counted = len(self.tokens) == len(self.logprobs)
        return self.known and bool(self.prompt) and counted and not self.doubt

    @property
    def has_content(self) -> bool:
        return any(said for name, said in self.message.items() if name != "role")

    def add_tokens(self, data: Fields, prompt: array[int]) -> None:
        """Add the token ids and log-probs of a part. `prompt`: of the whole response so far."""
        ids = _ids.decode(data.get("prompt_token_ids", b"null"))
        self.prompt = int32(ids) if ids else prompt or self.prompt
        ids = _ids.decode(data.get("token_ids", b"null"))
        if ids is not None:
            self.known = True
            self.tokens.extend(ids)
        self.spans = _spans.decode(data.get(SPANS, b"null")) or self.spans
        try:
            logprobs = _logprobs.decode(data.get("logprobs", b"null"))
        except msgspec.DecodeError as error:  # null for a token, or a list, from some servers
            self.doubt = self.doubt or f"its log-probs are not readable: {error}"
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
        said = _object.decode(data.get("message") or data.get("delta") or b"null") or {}
        for key, more in said.items():
            if key == "tool_calls" and "delta" in data:
                for part in more or ():
                    self.calls.add(part)
                message[key] = self.calls.all
            elif isinstance(more, str) and key != "role" and isinstance(message.get(key), str):
                message[key] += more
            elif more is not None or key not in message:
                message[key] = more

    def transition(self, version: int | None = None, **known: Any) -> Transition:
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
            **known,
        )


@dataclass(slots=True)
class ModelResponse:
    """A response under assembly, from one part or from the chunks of a stream."""

    doubt: str = ""  # why its tokens are not those that the model sampled
    choices: dict[int, SampledChoice] = field(default_factory=dict)
    prompt: array[int] = field(default_factory=int32)

    @property
    def begun(self) -> bool:
        """Whether the agent can read anything of it."""
        return any(one.tokens or one.has_content or one.finish for one in self.choices.values())

    def add(self, part: ResponseChunk, *, begun: bool = False) -> bool:
        """Add one part; return whether it may end a choice: such a part must not reach the agent
        before the response is stored. `begun`: the agent has read a part of the response, so it
        gets the rest even if the token ids cannot be read.

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
                choice.doubt = choice.doubt or f"its token ids are not readable: {error}"
        if part.choices:
            return any(value(data, "finish_reason") for data in part.choices)
        return any(choice.finish for choice in self.choices.values())

    def _choice(self, index: int) -> SampledChoice:
        if index not in self.choices:
            self.choices[index] = SampledChoice(doubt=self.doubt)
        return self.choices[index]

    def cut(self, finish: str) -> None:
        """End the choices that have begun; no further part follows."""
        begun = {i: c for i, c in self.choices.items() if c.finish or c.tokens or c.has_content}
        for choice in begun.values():
            choice.finish = choice.finish or finish
            choice.known = choice.known and bool(choice.tokens)  # text may arrive before its tokens
        self.choices = begun

    @property
    def complete(self) -> bool:
        return bool(self.choices) and all(choice.finish for choice in self.choices.values())
