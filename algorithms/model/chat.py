"""Chat messages to prompt tokens, by the model's chat template, and text to tokens and back: cached
encoding, streaming decoding, stop strings.
"""

from __future__ import annotations

import json
import logging
import math
import re
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from functools import cache, lru_cache
from threading import Lock
from typing import Any, Generic, TypeVar
from uuid import uuid4

import jinja2
import msgspec

from agentrl.algorithms.model.templates import template_fix
from agentrl.algorithms.model.tool_formats import parser_of
from agentrl.core.types import Json

T = TypeVar("T")
Tokenizer = Any  # transformers' tokenizers share no typed base class
CACHED_PIECES = 2**26  # bytes of cached encodings of texts between special tokens
TOKEN_BYTES = 36  # memory of a token id in a Python sequence
LARGE = 2**16  # characters from which a text is encoded without blocking other Python threads
MAX_SPLIT_CHARS = 2**20  # characters of a text that is encoded in pieces
SPREAD = 1024  # assumed maximum bytes per token, if a token may stand for any number of bytes
KEPT = {"ByteLevel", "Split", "Digits", "Metaspace", "Sequence", "Punctuation", "UnicodeScripts"}
KEPT |= {"NFC", "Prepend"}
"""Steps of tokenizers that drop no character, unless they remove what they split at."""
COMPOSED = 3  # Hangul characters that NFC composes to one, the maximum of all scripts
_SPACE = "\u2581"  # SentencePiece's
_BYTE = re.compile("<0x([0-9A-F]{2})>")  # SentencePiece's token of one byte
_SHOWN = [*range(33, 127), *range(161, 173), *range(174, 256)]  # bytes that GPT-2 spells as Latin-1
# Bytes that byte-level vocabularies write as characters from U+0100 on.
_HIDDEN = [byte for byte in range(256) if byte not in _SHOWN]
_BYTES = dict(
    zip(map(chr, (*_SHOWN, *range(256, 256 + len(_HIDDEN)))), _SHOWN + _HIDDEN, strict=True)
)
_PROBE = " a\n b "


class TooLongError(ValueError):
    """A text has too many tokens. what: its length, as part of a sentence."""

    def __init__(self, what: str) -> None:
        super().__init__(f"{what} do not fit")
        self.what = what


class ByteCache(Generic[T]):
    """The values that were used last, up to a number of bytes. For any thread."""

    def __init__(self, limit: int) -> None:
        self._limit, self._size, self._lock = limit, 0, Lock()
        self._entries: OrderedDict[object, tuple[T, int]] = OrderedDict()

    def get(self, key: object) -> T | None:
        with self._lock:
            if (entry := self._entries.get(key)) is None:
                return None
            self._entries.move_to_end(key)
            return entry[0]

    def put(self, key: object, value: T, size: int) -> None:
        """size: bytes of key and value."""
        with self._lock:
            self._size += size - self._entries.pop(key, (value, 0))[1]
            self._entries[key] = value, size
            while self._size > self._limit:
                _, (_, freed) = self._entries.popitem(last=False)
                self._size -= freed

    @property
    def size(self) -> int:
        return self._size


class Codec:
    """A tokenizer with caches. Invariant: `encode` equals encoding the whole text at once.

    limit: number of tokens that is too many. A text that certainly has this many is rejected before
    it is completely encoded, and such a text is never cached."""

    def __init__(self, tokenizer: Tokenizer, limit: int | None = None) -> None:
        self._tokenizer, self.parser = tokenizer, parser_of(tokenizer)
        self._backend = getattr(tokenizer, "backend_tokenizer", None)
        # Tokenizer.json may set truncation, which transformers removes late.
        if self._backend is not None:
            self._backend.no_truncation()
            self._backend.no_padding()
        self._hidden = frozenset(
            number
            for number, token in tokenizer.added_tokens_decoder.items()
            if token.special and token.content not in self.parser.marks
        )
        self.limit = math.inf if limit is None else limit
        self.most_bytes = self.limit if limit is None else limit * bytes_per_token(tokenizer)
        self._pieces = ByteCache[list[int]](CACHED_PIECES)
        self.token = lru_cache(None)(self._token)
        self._special_tokens = self._special_token_pattern()

    def encode(self, text: str) -> list[int]:
        """Token ids of rendered text, in which special tokens are written out.

        Raises TooLongError for a text that certainly has `limit` tokens or more."""
        self.check(text)
        if self._special_tokens is None or len(text) > MAX_SPLIT_CHARS:
            return self._encode(text)
        # Texts between special tokens repeat in a conversation, and encoding is the largest cost
        # of a request besides the model.
        ids, new = list[int](), dict[str, list[int]]()
        for piece in filter(None, self._special_tokens.split(text)):
            encoded = self._pieces.get(piece) or new.get(piece)
            if encoded is None:
                encoded = new[piece] = self._encode(piece)
            ids += encoded
            if len(ids) > 2 * self.limit:
                raise TooLongError(f"over {len(ids)} tokens")
        if len(ids) < self.limit:
            for piece, encoded in new.items():
                self._pieces.put(piece, encoded, 4 * len(piece) + TOKEN_BYTES * len(encoded))
        return ids

    def encode_plain(self, text: str) -> list[int]:
        """Token ids of a plain prompt, with the special tokens that the tokenizer adds. Raises as
        `encode`."""
        self.check(text)
        return self._encode(text, special=True)

    def check(self, text: str) -> None:
        """Raise TooLongError for a text with more bytes than any `limit` - 1 tokens can have."""
        if 4 * len(text) > self.most_bytes and (size := len(text.encode())) > self.most_bytes:
            raise TooLongError(f"{size} bytes")

    def decode(self, tokens: Sequence[int]) -> str:
        """Text without special tokens."""
        visible = [token for token in tokens if token not in self._hidden]
        return str((self._backend or self._tokenizer).decode(visible, skip_special_tokens=False))

    def _token(self, token: int) -> tuple[str, list[int]]:
        """The text of one token, and its bytes; the concatenated bytes of all tokens are UTF-8."""
        text, piece = str(self._tokenizer.decode([token])), self._piece_of(token)
        if (byte := _BYTE.fullmatch(piece)) and "\ufffd" in text:
            return text, [int(byte[1], 16)]
        if "\ufffd" in text and all(character in _BYTES for character in piece):
            return text, [_BYTES[character] for character in piece]
        if piece.startswith(_SPACE) and not text.startswith(" "):
            text = f" {text}"  # the decoder drops a space from the start of a text
        return text, list(text.encode())

    def _piece_of(self, token: int) -> str:
        """The token as written in the vocabulary."""
        return str(self._tokenizer.convert_ids_to_tokens(token) or "")

    def _encode(self, text: str, *, special: bool = False) -> list[int]:
        """special: with the special tokens that the tokenizer adds."""
        if self._backend is None:
            encoded = self._tokenizer(text, add_special_tokens=special)["input_ids"]
        elif len(text) <= LARGE:
            encoded = self._backend.encode(text, add_special_tokens=special).ids
        else:
            encoded = self._encode_large(text, special)
        ids: list[int] = encoded
        return ids

    def _encode_large(self, text: str, special: bool) -> list[int]:
        """Encode the start of a text first, which can show that the text is too long, because the
        rest changes only the tokens next to the cut. Encoding a whole text takes over a hundred
        times its memory."""
        size = len(text) if math.isinf(self.limit) else max(LARGE, 16 * int(self.limit))
        while size < len(text):
            if (count := len(self._encode_aside(text[:size], special))) > 2 * self.limit:
                raise TooLongError(f"over {count} tokens")
            size *= 2
        return self._encode_aside(text, special)

    def _encode_aside(self, text: str, special: bool) -> list[int]:
        """`backend.encode` in pieces, because it blocks other Python threads."""
        assert self._backend is not None
        (encoding,) = self._backend.encode_batch_fast([text], add_special_tokens=special)
        ids: list[int] = encoding.ids
        return ids

    def _special_token_pattern(self) -> re.Pattern[str] | None:
        """A pattern of the added tokens; None if separate encoding would change the tokens."""
        added = list(self._tokenizer.added_tokens_decoder.values())
        if not added or any(token.lstrip or token.rstrip or token.single_word for token in added):
            return None
        names = sorted((token.content for token in added), key=len, reverse=True)
        border = re.compile(f"({'|'.join(map(re.escape, names))})")
        probe = _PROBE + _PROBE.join(names) + _PROBE
        pieces = [token for piece in border.split(probe) if piece for token in self._encode(piece)]
        return border if pieces == self._encode(probe) else None


def bytes_per_token(tokenizer: Tokenizer) -> int:
    """Maximum bytes of text per token. If a token may stand for any number of bytes, such as that
    of unknown words, the result is at least SPREAD: a model with more on average would be
    useless."""
    vocabulary = tokenizer.get_vocab()
    longest = max((len(text.encode()) for text in vocabulary), default=1)
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        return max(longest, SPREAD)
    steps = [_state(backend.normalizer), _state(backend.pre_tokenizer)]
    for step in steps:  # the parts of a step follow it
        steps += step.get("normalizers", []) + step.get("pretokenizers", [])
    kinds = {str(step["type"]) for step in steps if step and step != SPACES}
    removes = any(step.get("behavior") == "Removed" for step in steps)
    added = backend.get_added_tokens_decoder().values()
    strips = any(token.lstrip or token.rstrip for token in added)
    spelled = "ByteLevel" in kinds and vocabulary.keys() >= _BYTES.keys()
    if not (spelled or getattr(backend.model, "byte_fallback", False)):
        strips = True  # one token may stand for many unknown characters
    longest *= COMPOSED if "NFC" in kinds else 1
    return max(longest, SPREAD) if removes or strips or not kinds <= KEPT else longest


SPACES = {"type": "Replace", "pattern": {"String": " "}, "content": _SPACE}


def _state(part: Any) -> dict[str, Any]:
    return {} if part is None else json.loads(part.__getstate__())


class TextStream:
    """Streams the text of one completion in complete characters, up to a stop string."""

    def __init__(self, codec: Codec, stop: Sequence[str] = ()) -> None:
        self._codec, self._stop = codec, stop
        self._keep = max(map(len, stop), default=1) - 1  # withheld: may start a stop string
        self._tokens: list[int] = []
        self._read = 0  # number of decoded tokens
        self._shown = 0  # number of these that are no longer needed as context
        self._text = ""  # decoded, not yet returned
        self.ended_by = ""  # the stop string that ended the text, once there is one

    @property
    def stopped(self) -> bool:
        return bool(self.ended_by)

    def push(self, tokens: Sequence[int]) -> str:
        """Add tokens; returns the text that is final."""
        return self._add(tokens, last=False)

    def finish(self) -> str:
        """The remaining text, including incomplete characters."""
        return self._add((), last=True)

    def _add(self, tokens: Sequence[int], *, last: bool) -> str:
        self._tokens += tokens
        read = self._codec.decode(self._tokens[self._shown : self._read])
        text = self._codec.decode(self._tokens[self._shown :])
        if last or not text.endswith("\ufffd"):
            self._text += text[len(read) :]
            self._shown, self._read = self._read, len(self._tokens)
        if self.stopped:
            return ""
        before_stop, self.ended_by = text_before_stop(self._text, self._stop)
        keep = 0 if last or self.stopped else self._keep
        end = max(len(before_stop) - keep, 0)
        final, self._text = before_stop[:end], before_stop[end:]
        return final


def text_before_stop(text: str, stop: Sequence[str]) -> tuple[str, str]:
    """The text before the first stop string, and that string; empty if there is none."""
    matches = [(at, string) for string in stop if (at := text.find(string)) >= 0]
    end, string = min(matches, default=(len(text), ""))
    return text[:end], string


log = logging.getLogger("agentrl.algorithm")
# Errors of a template on unexpected messages.
FIELDS = (TypeError, ValueError, LookupError, AttributeError)
BLIND = "tools_not_rendered"  # error code: the model would not see the tools
REASONING = ("reasoning_content", "thinking", "reasoning")  # fields of a message, the first wins
CACHED_PROMPTS = 2**27  # bytes of cached prompts: rollouts of a group start with the same request


class ErrorDetail(msgspec.Struct):
    """The error object of OpenAI's API."""

    message: str
    type: str
    param: str | None
    code: str | None


class ErrorBody(msgspec.Struct):
    error: ErrorDetail


class RequestError(Exception):
    """An error response of a policy server: its HTTP status and OpenAI's error object."""

    def __init__(
        self, message: str, *, status: int = 400, param: str | None = None, code: str | None = None
    ) -> None:
        super().__init__(message)
        kind = "invalid_request_error" if status < 500 else "server_error"
        self.status, self.body = status, ErrorBody(ErrorDetail(message, kind, param, code))


class WrittenArguments(dict[str, Any]):
    """The arguments of a tool call, and the JSON that they were read from."""

    def __init__(self, values: dict[str, Any], written: str) -> None:
        super().__init__(values)
        self.written = written


class Chat:
    """Renders requests. Invariant: equal bytes give equal tokens."""

    text_only = True  # whether all of a request is text

    def __init__(self, tokenizer: Tokenizer, codec: Codec) -> None:
        self._tokenizer, self._codec = tokenizer, codec
        self._prompts = ByteCache[tuple[int, ...]](CACHED_PROMPTS)
        # A sentence, set when the template has dropped a request's tools.
        self.blind: Future[str] = Future()
        # Digests of tool definitions that the template has rendered.
        self._shown: set[bytes] = set()
        self._reported = False  # whether it was logged that the template leaves out a text

    def encode(
        self, messages: list[dict[str, Json]], tools: Json = None, **options: Json
    ) -> tuple[int, ...]:
        """`prompt` of an already decoded request. options: `chat_template_kwargs`."""
        encode = msgspec.json.encode
        return self.prompt(encode(messages), encode(tools or None), encode(options))

    def prompt(self, messages: bytes, tools: bytes, options: bytes) -> tuple[int, ...]:
        """Token ids of a request's JSON `messages`, `tools` and `chat_template_kwargs`. For any
        thread.

        Raises RequestError if they are not valid for chat completions, and TooLongError."""
        key = messages, tools, options
        tokens = self._prompts.get(key)
        if tokens is None:
            tokens = self._prompt(*key)
            if len(tokens) < self._codec.limit:  # otherwise it is rejected
                self._prompts.put(key, tokens, sum(map(len, key)) + TOKEN_BYTES * len(tokens))
        return tokens

    def _prompt(self, messages: bytes, tools: bytes, options: bytes) -> tuple[int, ...]:
        conversation = [self.message(item, index) for index, item in enumerate(_list(messages))]
        if not conversation:
            raise RequestError("messages is empty: send at least one", param="messages")
        definitions = _list(tools, "tools") or None
        settings = msgspec.json.decode(options)
        if not isinstance(settings, dict):
            raise RequestError(
                "chat_template_kwargs is not an object", param="chat_template_kwargs"
            )
        text = self._render(conversation, definitions, settings)
        if not self._reported and (left_out := omission(conversation, text)):
            self._reported = True
            log.warning(
                "The chat template leaves out %s, so the model does not see it; %s",
                left_out,
                template_fix(self._tokenizer),
            )
        if definitions and tools not in self._shown:
            if text == self._render(conversation, None, settings):
                self._check_described(definitions, text)  # each time: messages differ
            else:
                self._shown.add(tools)
        text = self._as_written(text, conversation, definitions, settings)
        return self.tokens(text, messages)

    async def fetch(self, messages: bytes) -> None:
        """Called before a request's JSON `messages` are rendered, to load the images that they
        name."""

    def message(self, message: dict[str, Json], index: int) -> dict[str, Json]:
        """A message for the template."""
        return template_message(message, index)

    def tokens(self, text: str, messages: bytes) -> tuple[int, ...]:
        """Token ids of the rendered `messages`."""
        return tuple(self._codec.encode(text))

    def _check_described(self, tools: list[dict[str, Json]], text: str) -> None:
        """Check tools that the template drops: an agent may describe them in a message instead, so
        that the text contains their descriptions. Raises RequestError unless it contains all of
        them."""
        fix = template_fix(self._tokenizer)
        hidden = [tool for tool in tools if not is_described(tool, text)]
        if not hidden:
            warn_described(fix)
            return
        sentence = (
            "the model's chat template does not render tools, so the model would not see "
            f"{', '.join(tool_names(hidden)) or 'them'}; {fix}, "
            "choose a model whose template renders them (an instruct model with tool calls)"
            ", replace its chat_template.jinja, repeat their descriptions in a message, or send no"
            " tools. A model that was never trained with tools needs demonstrations of calls, too"
            " ([warmup]; docs/how-to/tools.md)"
        )
        if not self.blind.done():
            self.blind.set_result(sentence)
        raise RequestError(sentence, param="tools", code=BLIND)

    def _as_written(
        self, text: str, messages: list[dict[str, Any]], tools: Json, settings: dict[str, Json]
    ) -> str:
        """The rendered `text` with the arguments of tool calls as the model wrote them. Templates
        serialise them again, with other white space, escapes or numbers, so the prompt would not
        continue the tokens of the model's answer. The messages are rendered with marks in place of
        the arguments to find their positions. Arguments that a template does not serialise as JSON
        stay unchanged. Changes `messages`."""
        replaced: list[tuple[str, str, str]] = []  # mark, as serialised, as written
        calls = (call for message in messages for call in message.get("tool_calls") or ())
        for function in (call["function"] for call in calls):
            arguments = function.get("arguments")
            serialised = json.dumps(arguments, ensure_ascii=False)
            if isinstance(arguments, WrittenArguments) and arguments.written != serialised:
                function["arguments"] = {uuid4().hex: 0}
                mark = json.dumps(function["arguments"])
                replaced.append((mark, serialised, arguments.written))
        if not replaced:
            return text
        reserialised = written = self._render(messages, tools, settings)
        for mark, serialised, original in replaced:
            reserialised, written = (
                reserialised.replace(mark, serialised),
                written.replace(mark, original),
            )
        return written if reserialised == text else text

    def _render(
        self, messages: list[dict[str, Json]], tools: Json, settings: dict[str, Json]
    ) -> str:
        try:
            text: str = self._tokenizer.apply_chat_template(
                messages,
                tools=tools,
                **{"add_generation_prompt": True, **settings, "tokenize": False},
            )
        except (jinja2.TemplateError, RecursionError, *FIELDS) as error:
            raise RequestError(
                f"the model's chat template cannot render these messages: {error}", param="messages"
            ) from None
        return text


@cache
def warn_described(fix: str) -> None:
    """Once per process."""
    log.warning(
        "The chat template does not render tools, which messages describe instead; to let it"
        " render them, too, %s, or send no tools.",
        fix,
    )


def omission(messages: Sequence[dict[str, Any]], text: str) -> str:
    """The first message whose text is not in the rendered `text`, in words; "" if there is none.
    White space and escapes do not count. What the assistant wrote does not count either, since
    many templates leave out earlier reasoning, but the values of its calls do."""
    shown, cursor = "", 0  # most texts follow each other, so each is looked for after the last one
    for index, message in enumerate(messages):
        calls = message.get("tool_calls") or ()
        values = [value for call in calls for value in _texts(call["function"]["arguments"])]
        if message["role"] != "assistant":
            content = message["content"] or ""
            parts = [{"text": content}] if isinstance(content, str) else content  # or with images
            values = [part["text"] for part in parts if isinstance(part.get("text"), str)]
        for value in map(str.strip, values):
            at = text.find(value, cursor)
            if at >= 0 or value in text:
                cursor = max(cursor, at + len(value))
                continue
            shown = shown or _squeezed(text)
            if _squeezed(value) not in shown and _squeezed(json.dumps(value)[1:-1]) not in shown:
                what = "a call's argument in" if message["role"] == "assistant" else "the text of"
                return f"{what} messages[{index}] (role {message['role']})"
    return ""


def _texts(value: Json) -> Iterator[str]:
    """The strings in the arguments of a call."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict | list):
        for inner in value.values() if isinstance(value, dict) else value:
            yield from _texts(inner)


def _squeezed(text: str) -> str:
    return re.sub(r"[\s\\]+", "", text)


def is_described(tool: dict[str, Json], text: str) -> bool:
    """Whether a prompt has a tool's name and the first line of its description, as text or in JSON;
    for a tool without a description, whether its name is written as name(, "name", `name` or
    name:."""
    function = tool.get("function", tool)
    if not isinstance(function, dict):
        return False
    name, description = (function.get(key) for key in ("name", "description"))
    if not isinstance(name, str) or name not in text:
        return False
    if not (isinstance(description, str) and description.strip()):
        named = re.escape(name)
        return bool(re.search(rf"""(?<!\w){named}[(:]|["'`]{named}["'`]""", text))
    words, shown = " ".join(description.strip().splitlines()[0].split()), " ".join(text.split())
    written = [json.dumps(words, ensure_ascii=plain)[1:-1] for plain in (False, True)]
    return any(spelling in shown for spelling in (words, *written))


def tool_names(tools: list[dict[str, Json]]) -> list[str]:
    """Names of function tools."""
    functions = (tool.get("function", tool) for tool in tools)
    names = (function.get("name") for function in functions if isinstance(function, dict))
    return [name for name in names if isinstance(name, str) and name]


def _list(raw: bytes, param: str = "messages") -> list[dict[str, Json]]:
    items = msgspec.json.decode(raw)
    if items is None:
        return []
    if not isinstance(items, list) or not all(isinstance(item, dict) for item in items):
        raise RequestError(f"{param} is not a list of objects", param=param)
    return items


def template_message(
    message: dict[str, Json], index: int, content: Callable[[Json, str], Json] | None = None
) -> dict[str, Json]:
    """Convert a message to the form that templates expect: text content, arguments as objects.
    content: called as (content, its place in the request) to convert it in another way."""
    where = f"messages[{index}]"
    if not isinstance(message.get("role"), str):
        raise RequestError(f"{where} has no role", param="messages")
    message = _edited(message)
    message["content"] = (content or text_content)(message.get("content"), where)
    if calls := message.get("tool_calls"):
        if not isinstance(calls, list):
            raise RequestError(f"{where}.tool_calls is not a list", param="messages")
        message["tool_calls"] = [_call(call, where) for call in calls]
    return message


def _edited(message: dict[str, Json]) -> dict[str, Json]:
    """Edit a message like transformers since 5.21.1 does before rendering, so that older releases
    render the same prompt: keys with null are removed, and reasoning gets the names that templates
    read."""
    message = {key: value for key, value in message.items() if value is not None}
    if reasoning := [message[name] for name in REASONING if name in message]:
        message = {"thinking": reasoning[0], **message, "reasoning_content": reasoning[0]}
    return message


def text_content(content: Json, where: str) -> str:
    """The text of a message's content. Raises RequestError if it is more than text."""
    if content is None or isinstance(content, str):
        return content or ""
    parts = content if isinstance(content, list) else [content]
    texts = [part["text"] for part in parts if isinstance(part, dict) and "text" in part]
    if len(texts) != len(parts) or not all(isinstance(text, str) for text in texts):
        raise RequestError(f"{where}.content has a part that is not text", param="messages")
    return "".join(texts)


def _call(call: Json, where: str) -> dict[str, Any]:
    if not isinstance(call, dict) or not isinstance(call.get("function"), dict):
        raise RequestError(f"{where}.tool_calls has an entry without a function", param="messages")
    function = dict(call["function"])
    function["arguments"] = _arguments(function.get("arguments") or "{}")
    return {**call, "function": function}


def _arguments(arguments: Json) -> Json:
    """Arguments as objects: templates serialise them, and would quote a string twice. Malformed
    ones, written by the model, are left unchanged."""
    try:
        values = json.loads(arguments) if isinstance(arguments, str) else arguments
    except (ValueError, RecursionError):
        return arguments
    if isinstance(arguments, str) and isinstance(values, dict):
        return WrittenArguments(values, arguments.strip())
    return values
