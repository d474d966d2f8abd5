"""What the gateway adds to a model call, and how it reads and tidies the answer.

The additions are `return_token_ids` and `logprobs`, plus the rollout's sampling parameters where
the agent is silent. The agent's own words are never changed, and what it did not ask for is taken
out of the answer again, so it sees what the real API would have shown.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import msgspec

from agentrl.types import Json, Sampling, Transition, float32, int32

CHAT = "chat/completions"
TEXT = "completions"


@dataclass(frozen=True, slots=True)
class Call:
    """A request of the agent, ready to forward to whichever server answers."""

    api: str  # CHAT or TEXT
    body: dict[str, Json]  # with the additions; `model` as the agent named it
    key: int  # the same for a repetition of the same request
    sampling: Sampling  # in force
    shows_tokens: bool  # the agent asked for token ids itself
    shows_logprobs: bool

    @property
    def model(self) -> str:
        return str(self.body.get("model", ""))

    @property
    def stream(self) -> bool:
        return self.body.get("stream") is True

    def encode(self, model: str) -> bytes:
        return msgspec.json.encode(self.body | {"model": model})

    def tidy(self, answer: dict[str, Json]) -> bytes:
        """A whole answer, or a chunk of a stream, as the agent's API would have sent it."""
        answer["model"] = self.model
        choices = answer.get("choices") or ()
        if not self.shows_tokens:
            answer.pop("prompt_token_ids", None)
        for choice in choices:
            if not self.shows_tokens:
                choice.pop("token_ids", None)
                choice.pop("prompt_token_ids", None)
            if not self.shows_logprobs and "logprobs" in choice:
                choice["logprobs"] = None
        return msgspec.json.encode(answer)


def read_call(api: str, raw: bytes, defaults: Sampling, index: int) -> Call:
    """Understand and complete a request. Raises msgspec.DecodeError unless it is a JSON object."""
    body = msgspec.json.decode(raw, type=dict[str, Any])
    wants_logprobs = body.get("logprobs")
    shows_logprobs = wants_logprobs is not None and wants_logprobs is not False
    shows_tokens = body.get("return_token_ids") is True
    body["return_token_ids"] = True
    if not shows_logprobs:
        body["logprobs"] = True if api == CHAT else 1
    sampling = _complete(body, defaults, index)
    return Call(api, body, hash(raw), sampling, shows_tokens, shows_logprobs)


def _complete(body: dict[str, Json], defaults: Sampling, index: int) -> Sampling:
    """Fill the parameters on which the agent is silent; returns all that are in force."""
    limit = body.get("max_completion_tokens")
    limit = body.get("max_tokens") if limit is None else limit
    if limit is None and defaults.max_tokens is not None:
        limit = body["max_tokens"] = defaults.max_tokens
    for name in ("temperature", "top_p"):
        if body.get(name) is None:
            body[name] = getattr(defaults, name)
    if body.get("top_k") is None and defaults.top_k:
        body["top_k"] = defaults.top_k
    if body.get("seed") is None and defaults.seed is not None:
        body["seed"] = defaults.seed + index  # equal calls of one attempt are still independent
    return Sampling(
        temperature=body["temperature"],
        top_p=body["top_p"],
        top_k=body.get("top_k") or 0,
        max_tokens=limit,
        seed=body.get("seed"),
    )


@dataclass(slots=True)
class Choice:
    """One sampled continuation, complete once `finish` is set."""

    prompt: list[int] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    message: dict[str, Json] = field(default_factory=dict)
    finish: str | None = None

    @property
    def exact(self) -> bool:
        """Every sampled token is known, with the log-prob it was sampled at."""
        return bool(self.prompt) and len(self.tokens) == len(self.logprobs)


@dataclass(slots=True)
class Answer:
    """An answer as it becomes known: absorb the whole of it, or chunk by chunk."""

    choices: dict[int, Choice] = field(default_factory=dict)
    prompt: list[int] = field(default_factory=list)

    def absorb(self, part: dict[str, Json]) -> bool:
        """Read one part; true if it may end a choice, so that the agent must not see it early."""
        self.prompt = part.get("prompt_token_ids") or self.prompt
        choices = part.get("choices") or ()
        for data in choices:
            choice = self.choices.setdefault(data.get("index", 0), Choice())
            choice.prompt = data.get("prompt_token_ids") or self.prompt or choice.prompt
            choice.tokens += data.get("token_ids") or ()
            choice.logprobs += _logprobs(data.get("logprobs") or {})
            _merge(choice.message, data)
            choice.finish = data.get("finish_reason") or choice.finish
        return not choices or any(data.get("finish_reason") for data in choices)

    @property
    def complete(self) -> bool:
        return bool(self.choices) and all(choice.finish for choice in self.choices.values())


def _logprobs(data: dict[str, Json]) -> list[float]:
    if "token_logprobs" in data:  # completions
        return list(data["token_logprobs"] or ())
    return [entry["logprob"] for entry in data.get("content") or ()]


def _merge(message: dict[str, Json], data: dict[str, Json]) -> None:
    """Add a whole message, or a streamed difference, to what is known of it."""
    if "text" in data:  # completions
        message["role"] = "assistant"
        message["content"] = message.get("content", "") + data["text"]
    for key, value in (data.get("message") or data.get("delta") or {}).items():
        if key == "tool_calls" and "delta" in data:
            _merge_tools(message.setdefault(key, []), value or ())
        elif isinstance(value, str) and key != "role" and isinstance(message.get(key), str):
            message[key] += value
        elif value is not None or key not in message:
            message[key] = value


def _merge_tools(calls: list[dict[str, Json]], deltas: Any) -> None:
    for delta in deltas:
        position = delta.get("index", len(calls))
        while len(calls) <= position:
            calls.append({"type": "function", "function": {"name": "", "arguments": ""}})
        call = calls[position]
        call |= {k: v for k, v in delta.items() if k not in ("index", "function") and v is not None}
        for key, value in (delta.get("function") or {}).items():
            call["function"][key] = call["function"].get(key, "") + (value or "")


def messages_of(call: Call) -> list[dict[str, Json]]:
    """The conversation the agent sent; a text prompt is one user message."""
    messages = call.body.get("messages", call.body.get("prompt"))
    if isinstance(messages, str):
        return [{"role": "user", "content": messages}]
    return [m for m in messages or () if isinstance(m, dict)]


def transition(choice: Choice, call: Call, **known: Any) -> Transition:
    """The stored form of a choice. Without exact ids it is kept, marked inexact."""
    return Transition(
        prompt=int32(choice.prompt),
        completion=int32(choice.tokens),
        logprobs=float32(choice.logprobs if choice.exact else ()),
        sampling=call.sampling,
        finish=choice.finish or "stop",
        exact=choice.exact,
        messages=messages_of(call),
        tools=call.body.get("tools") or [],
        answer=choice.message,
        **known,
    )
