"""The wire: OpenAI's chat completions and completions with vLLM's additions, as typed structs."""

from __future__ import annotations

from typing import Annotated

import msgspec
from msgspec import UNSET, Meta, UnsetType

from agentrl.algorithms.model.tool_parser import Function, ToolCall
from agentrl.types import Json


class StreamOptions(msgspec.Struct):
    include_usage: bool | None = None


class _Request(msgspec.Struct, kw_only=True):
    """What both kinds of request share. Unknown fields are ignored: clients send many."""

    model: str | None = None
    n: Annotated[int, Meta(ge=1, le=128)] | None = None
    temperature: Annotated[float, Meta(ge=0)] | None = None
    top_p: Annotated[float, Meta(gt=0, le=1)] | None = None
    top_k: Annotated[int, Meta(ge=-1)] | None = None
    max_tokens: Annotated[int, Meta(ge=1)] | None = None
    seed: int | None = None
    stop: str | list[str] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    return_token_ids: bool | None = None


class ChatRequest(_Request):
    messages: msgspec.Raw
    tools: msgspec.Raw = msgspec.Raw(b"null")
    chat_template_kwargs: msgspec.Raw = msgspec.Raw(b"{}")
    tool_choice: Json = None
    logprobs: bool | None = None
    max_completion_tokens: Annotated[int, Meta(ge=1)] | None = None


class TextRequest(_Request):
    prompt: str | list[int]
    logprobs: int | None = None


class Usage(msgspec.Struct):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int


class TokenLogprob(msgspec.Struct):
    token: str
    logprob: float
    bytes: list[int]
    top_logprobs: list[Json]


class ChatLogprobs(msgspec.Struct):
    content: list[TokenLogprob]


class TextLogprobs(msgspec.Struct):
    tokens: list[str]
    token_logprobs: list[float]
    top_logprobs: None = None
    text_offset: list[int] = []


class ChatMessage(msgspec.Struct, kw_only=True):
    role: str = "assistant"
    content: str | None
    tool_calls: list[ToolCall] | UnsetType = UNSET


class IndexedToolCall(msgspec.Struct, kw_only=True):
    """A whole tool call inside a stream."""

    index: int
    id: str
    type: str
    function: Function


class MessageDelta(msgspec.Struct, kw_only=True):
    role: str | UnsetType = UNSET
    content: str | UnsetType | None = UNSET
    tool_calls: list[IndexedToolCall] | UnsetType = UNSET


class CompletionChoice(msgspec.Struct, kw_only=True):
    """One completion, or in a stream a piece of it. Chat has message or delta, completions text."""

    index: int
    message: ChatMessage | UnsetType = UNSET
    delta: MessageDelta | UnsetType = UNSET
    text: str | UnsetType = UNSET
    logprobs: ChatLogprobs | TextLogprobs | None = None
    finish_reason: str | None = None
    token_ids: list[int] | UnsetType = UNSET
    prompt_token_ids: tuple[int, ...] | UnsetType = UNSET


class Response(msgspec.Struct, kw_only=True):
    id: str
    object: str
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: Usage | UnsetType | None = UNSET
    prompt_token_ids: tuple[int, ...] | UnsetType = UNSET
