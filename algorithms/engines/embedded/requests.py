"""Requests and responses of the embedded server: OpenAI's chat completions and completions with
vLLM's additions, as typed structs, whole or streamed.

A field of OpenAI's or vLLM's API that would change the answer but is not supported is rejected,
unless its value is the default. Fields that cannot change the answer are ignored, and so are
unknown fields, with a line in the log.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Annotated

import msgspec
from msgspec import UNSET, Meta, UnsetType

from agentrl.algorithms.engines.embedded.attention import Spans, TokenUpdate
from agentrl.algorithms.model.chat import Codec, RequestError, TextStream, text_before_stop
from agentrl.algorithms.model.tool_formats import ToolCall, ToolParser
from agentrl.core.types import Json

log = logging.getLogger("agentrl.algorithm")

NO_GUIDE = "needs guided decoding, which the embedded server does not have"
OWN_DISTRIBUTION = "the embedded server samples with temperature, top_p and top_k only"
NO_SUCH_OPTION = "the embedded server does not have this option"
VLLM = 'leave it out, or serve the policy with engine.kind = "vllm"'

GUIDED: dict[str, tuple[Json, ...]] = {
    "response_format": ({"type": "text"},), "tool_choice": ("auto", "none"),
    "function_call": ("auto", "none"), "structural_tag": (),
    "structured_outputs": ({},), "guided_json": (), "guided_regex": (), "guided_choice": (),
    "guided_grammar": (), "guided_decoding_backend": (), "guided_whitespace_pattern": (),
}  # fmt: skip
"""Field -> its values, besides null, that change nothing; so below."""
PROCESSED: dict[str, tuple[Json, ...]] = {
    "frequency_penalty": (0,), "presence_penalty": (0,), "repetition_penalty": (1,), "min_p": (0,),
    "logit_bias": ({},), "bad_words": ([],), "allowed_token_ids": (), "min_tokens": (0,),
    "typical_p": (1,), "length_penalty": (1,), "use_beam_search": (False,), "best_of": (1,),
    "logits_processors": ([],), "vllm_xargs": ({},), "thinking_token_budget": (),
    "repetition_detection": (),
}  # fmt: skip
OTHER: dict[str, tuple[Json, ...]] = {
    "functions": ([],), "modalities": (["text"],), "audio": (), "web_search_options": (),
    "echo": (False,), "suffix": ("",), "prompt_logprobs": (), "prompt_embeds": (),
    "truncate_prompt_tokens": (), "documents": ([],), "chat_template": (),
    "add_generation_prompt": (True,), "continue_final_message": (False,), "moderation": (),
    "add_special_tokens": (False,), "include_stop_str_in_output": (False,),
    "skip_special_tokens": (True,), "return_tokens_as_token_ids": (False,),
    "include_reasoning": (True,),
}  # fmt: skip
REFUSED = {
    name: (values, why)
    for table, why in ((GUIDED, NO_GUIDE), (PROCESSED, OWN_DISTRIBUTION), (OTHER, NO_SUCH_OPTION))
    for name, values in table.items()
}
HARMLESS = {
    "user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key",
    "prompt_cache_retention", "prompt_cache_options", "prediction", "request_id", "priority",
    "cache_salt", "spaces_between_special_tokens", "mm_processor_kwargs",
    "kv_transfer_params",
}  # fmt: skip
_fields = msgspec.json.Decoder(dict[str, msgspec.Raw])
_reported: set[str] = set()


def check_fields(raw: bytes, supported: tuple[str, ...]) -> None:
    """Raise RequestError for a field that would change the answer but is not supported. raw: a JSON
    object. supported: names of the supported fields."""
    for name, value in _fields.decode(raw).items():
        if name in REFUSED:
            _check(name, msgspec.json.decode(value))
        elif name not in supported and name not in HARMLESS and name not in _reported:
            _reported.add(name)
            log.warning("the embedded server ignores the field %r of requests", name)


def _check(name: str, value: Json) -> None:
    harmless, why = REFUSED[name]
    if value is None or value in harmless:
        return
    raise RequestError(
        f"{name} = {msgspec.json.encode(value).decode():.80}: {why}; {VLLM}", param=name
    )


MAX_TEMPERATURE = 1e30  # logits are divided by it in float32
MAX_LOGPROBS = 20  # alternatives per token, as in OpenAI's API


class StreamOptions(msgspec.Struct):
    include_usage: bool | None = None


class _Request(msgspec.Struct, kw_only=True):
    """The fields of both kinds of request; `check_fields` checks others that clients send."""

    model: str | None = None
    n: Annotated[int, Meta(ge=1, le=128)] | None = None
    temperature: Annotated[float, Meta(ge=0, le=MAX_TEMPERATURE)] | None = None
    top_p: Annotated[float, Meta(gt=0, le=1)] | None = None
    top_k: Annotated[int, Meta(ge=-1, le=2**31)] | None = None
    max_tokens: Annotated[int, Meta(ge=1)] | None = None
    seed: int | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    ignore_eos: bool | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    return_token_ids: bool | None = None


class ChatRequest(_Request):
    messages: msgspec.Raw
    tools: msgspec.Raw = msgspec.Raw(b"null")
    chat_template_kwargs: dict[str, Json] | None = None
    reasoning_effort: Json = None  # like `verbosity`, for templates that use it
    verbosity: Json = None
    tool_choice: Json = None
    parallel_tool_calls: bool | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Meta(ge=0, le=MAX_LOGPROBS)] | None = None
    max_completion_tokens: Annotated[int, Meta(ge=1)] | None = None


class TextRequest(_Request):
    prompt: str | list[int]
    logprobs: Annotated[int, Meta(ge=0, le=MAX_LOGPROBS)] | None = None


class Usage(msgspec.Struct):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int


class TopLogprob(msgspec.Struct):
    token: str
    logprob: float
    bytes: list[int]


class TokenLogprob(TopLogprob):
    top_logprobs: list[TopLogprob]


class ChatLogprobs(msgspec.Struct):
    content: list[TokenLogprob]


class TextLogprobs(msgspec.Struct):
    tokens: list[str]
    token_logprobs: list[float]
    top_logprobs: list[dict[str, float]] | None
    text_offset: list[int]


class ChatMessage(msgspec.Struct, kw_only=True):
    role: str = "assistant"
    content: str | None
    tool_calls: list[ToolCall] | UnsetType = UNSET


class IndexedToolCall(ToolCall, frozen=True, kw_only=True):
    """A tool call in a stream, sent in one chunk."""

    index: int


class MessageDelta(msgspec.Struct, kw_only=True):
    role: str | UnsetType = UNSET
    content: str | UnsetType | None = UNSET
    tool_calls: list[IndexedToolCall] | UnsetType = UNSET


class CompletionChoice(msgspec.Struct, kw_only=True):
    """A completion or a chunk of one: chat has `message` or `delta`, completions have `text`."""

    index: int
    message: ChatMessage | UnsetType = UNSET
    delta: MessageDelta | UnsetType = UNSET
    text: str | UnsetType = UNSET
    logprobs: ChatLogprobs | TextLogprobs | None = None
    finish_reason: str | None = None
    stop_reason: str | UnsetType = UNSET  # the stop string that ended it
    token_ids: list[int] | UnsetType = UNSET
    # As `TokenUpdate.spans`; unset if the header's version sampled all tokens.
    agentrl_spans: Spans | UnsetType = UNSET
    prompt_token_ids: tuple[int, ...] | UnsetType = UNSET


class Response(msgspec.Struct, kw_only=True):
    id: str
    object: str
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: Usage | UnsetType | None = UNSET
    prompt_token_ids: tuple[int, ...] | UnsetType = UNSET


@dataclass(frozen=True, slots=True)
class ResponseFormat:
    """Builds the responses to one request, with the fields that the client asked for."""

    codec: Codec
    model: str
    prompt: tuple[int, ...]
    chat: bool
    tools: bytes  # the request's tools as JSON; empty: do not parse calls
    parallel: bool  # show all of them, not the first only
    thinking: bool  # whether the prompt has opened the reasoning
    logprobs: bool
    token_ids: bool
    stop: tuple[str, ...]
    id: str

    def whole(self, updates: Sequence[TokenUpdate], version: int) -> Response:
        """The response to a request that does not stream. updates: the final update of each choice.
        version: the version in the header."""
        choices = [self._choice(index, update) for index, update in enumerate(updates)]
        for choice, update in zip(choices, updates, strict=True):
            choice.agentrl_spans = _unless_plain(update.spans, version)
        tokens = sum(len(update.tokens) for update in updates)
        return self.response(choices, usage=self.usage(tokens), first=True)

    def response(
        self,
        choices: list[CompletionChoice],
        *,
        usage: Usage | None = None,
        first: bool,
        chunk: bool = False,
    ) -> Response:
        kind = "chat.completion" if self.chat else "text_completion"
        if first and self.token_ids and not self.chat:
            for choice in choices:
                choice.prompt_token_ids = self.prompt
        return Response(
            id=self.id,
            object=f"{kind}.chunk" if chunk and self.chat else kind,
            created=int(time.time()),
            model=self.model,
            choices=choices,
            usage=usage or UNSET,
            prompt_token_ids=self.prompt if first and self.token_ids and self.chat else UNSET,
        )

    def parser(self) -> ToolParser | None:
        """A new parser of the tool calls in one choice, if calls are possible."""
        if not self.tools:
            return None
        return self.codec.parser(thinking=self.thinking, tools=self.tools)

    def usage(self, completion_tokens: int) -> Usage:
        size = len(self.prompt)
        return Usage(size, completion_tokens, size + completion_tokens)

    def chunk(self, index: int, update: TokenUpdate, offset: int = 0) -> CompletionChoice:
        """A choice without its text. offset: characters of its earlier tokens."""
        return CompletionChoice(
            index=index,
            finish_reason=update.finish,
            logprobs=self._logprobs(update, offset) if self.logprobs else None,
            token_ids=update.tokens if self.token_ids else UNSET,
        )

    def _choice(self, index: int, update: TokenUpdate) -> CompletionChoice:
        choice = self.chunk(index, update)
        text, string = text_before_stop(self.codec.decode(update.tokens), self.stop)
        choice.stop_reason = string or UNSET
        if not self.chat:
            choice.text = text
            return choice
        parser = self.parser()
        content, calls = parser.whole(text) if parser else (text, [])
        calls = calls if self.parallel else calls[:1]
        choice.message = ChatMessage(content=content or ("" if not calls else None))
        if calls:
            choice.message.tool_calls = calls
            if update.finish == "stop":
                choice.finish_reason = "tool_calls"
        return choice

    def _logprobs(self, update: TokenUpdate, offset: int) -> ChatLogprobs | TextLogprobs:
        tokens = [self.codec.token(token) for token in update.tokens]
        top = update.top or [[]] * len(tokens)
        positions = list(zip(tokens, update.logprobs, top, strict=True))
        if self.chat:
            return ChatLogprobs(
                [
                    TokenLogprob(text, p, raw, [self._top(*candidate) for candidate in likely])
                    for (text, raw), p, likely in positions
                ]
            )
        texts = [text for text, _ in tokens]
        top_logprobs = [
            {self.codec.token(token)[0]: q for token, q in reversed(likely)} | {text: p}
            for (text, _), p, likely in positions
        ]
        starts = accumulate(map(len, texts[:-1]), initial=offset) if texts else ()
        return TextLogprobs(
            texts, update.logprobs, top_logprobs if update.top else None, list(starts)
        )

    def _top(self, token: int, logprob: float) -> TopLogprob:
        text, raw = self.codec.token(token)
        return TopLogprob(text, logprob, raw)


def _unless_plain(spans: Spans, version: int) -> Spans | UnsetType:
    return UNSET if not spans or list(spans) == [(0, version)] else spans


class StreamedChoice:
    """Turns the tokens of one streamed choice into OpenAI's chunks."""

    def __init__(self, form: ResponseFormat, index: int, version: int) -> None:
        """version: the version in the header."""
        self._format, self._index, self._version = form, index, version
        self._spans: list[tuple[int, int]] = []
        self._tokens = self._offset = 0
        self._text = TextStream(form.codec, form.stop)
        self._tools = form.parser()
        self._first = True

    def push(self, update: TokenUpdate) -> CompletionChoice | None:
        """The chunk for these tokens; None if it would be empty."""
        text = self._text.push(update.tokens)
        choice = self._format.chunk(self._index, update, self._offset)
        if isinstance(choice.logprobs, TextLogprobs):
            self._offset += sum(map(len, choice.logprobs.tokens))
        for start, version in update.spans:
            if not self._spans or self._spans[-1][1] != version:
                self._spans.append((self._tokens + start, version))
        self._tokens += len(update.tokens)
        if update.finish:
            text += self._text.finish()
            choice.agentrl_spans = _unless_plain(self._spans, self._version)
            choice.stop_reason = self._text.ended_by or UNSET
        if self._format.chat:
            choice.delta = self._delta(text, bool(update.finish))
            if self._tools and self._tools.count and update.finish == "stop":
                choice.finish_reason = "tool_calls"
        else:
            choice.text = text
        if choice.delta == MessageDelta() and not (
            update.finish or self._format.logprobs or self._format.token_ids
        ):
            return None
        return choice

    def _delta(self, text: str, last: bool) -> MessageDelta:
        parts: list[str | ToolCall] = [text] if text else []
        if self._tools:
            count = self._tools.count
            parts = self._tools.push(text) + (self._tools.finish() if last else [])
        content = "".join(part for part in parts if isinstance(part, str))
        delta = MessageDelta(content=content or UNSET)
        calls = [part for part in parts if isinstance(part, ToolCall)]
        if calls:
            delta.tool_calls = [
                IndexedToolCall(**msgspec.structs.asdict(call), index=index)
                for index, call in enumerate(calls, count)
                if self._format.parallel or not index
            ] or UNSET
        if self._first:
            self._first = False
            delta.role = "assistant"
            delta.content = content
        return delta
