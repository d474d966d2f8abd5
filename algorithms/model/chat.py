"""Render chat messages to prompt tokens with the model's chat template."""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Callable
from concurrent.futures import Future
from functools import cache
from typing import Any
from uuid import uuid4

import jinja2
import msgspec

from agentrl.algorithms.formats.choose import template_cure
from agentrl.algorithms.model.load import Tokenizer
from agentrl.algorithms.model.text import TOKEN_BYTES, ByteCache, Codec
from agentrl.types import Json

log = logging.getLogger("agentrl.algorithm")
FIELDS = (TypeError, ValueError, LookupError, AttributeError)  # of a template, on odd messages
BLIND = "tools_not_rendered"  # the code of an error: the model would not see the tools
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
        self.blind: Future[str] = Future()  # a sentence, once a request had tools in vain
        self._shown: set[bytes] = set()  # tool definitions that the template is known to render

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
        found = self._prompts.get(key)
        if found is None:
            found = self._prompt(*key)
            if len(found) < self._codec.limit:  # else it is refused
                self._prompts.put(key, found, sum(map(len, key)) + TOKEN_BYTES * len(found))
        return found

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
        if definitions and tools not in self._shown:
            if text == self._render(conversation, None, settings):
                self._check_described(definitions, text)  # each time: messages differ
            else:
                self._shown.add(tools)
        text = self._as_written(text, conversation, definitions, settings)
        return self.tokens(text, messages)

    async def fetch(self, messages: bytes) -> None:
        """Called before a request's JSON `messages` are rendered, for what they name."""

    def message(self, message: dict[str, Json], index: int) -> dict[str, Json]:
        """A message for the template."""
        return template_message(message, index)

    def tokens(self, text: str, messages: bytes) -> tuple[int, ...]:
        """Token ids of the rendered `messages`."""
        return tuple(self._codec.encode(text))

    def _check_described(self, tools: list[dict[str, Json]], text: str) -> None:
        """For tools that the template drops: an agent may describe them in a message instead, and
        then the text has their descriptions. Raises RequestError unless it has those of all."""
        cure = template_cure(self._tokenizer)
        hidden = [tool for tool in tools if not is_described(tool, text)]
        if not hidden:
            say_described(cure)
            return
        sentence = (
            "the model's chat template does not render tools, so the model would not see "
            f"{', '.join(tool_names(hidden)) or 'them'}; {cure}, "
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
        """The rendered `text` with the arguments of tool calls as they were written. Templates
        serialise them again, with other white space, escapes or numbers than the model's own, and
        then the prompt would not continue the tokens of the model's answer.

        Marks in place of the arguments show where the template has put them. A template that
        serialises them in another way than as JSON keeps its own. Changes `messages`."""
        found: list[tuple[str, str, str]] = []  # mark, as serialised, as written
        calls = (call for message in messages for call in message.get("tool_calls") or ())
        for function in (call["function"] for call in calls):
            arguments = function.get("arguments")
            serialised = json.dumps(arguments, ensure_ascii=False)
            if isinstance(arguments, WrittenArguments) and arguments.written != serialised:
                function["arguments"] = {uuid4().hex: 0}
                mark = json.dumps(function["arguments"])
                found.append((mark, serialised, arguments.written))
        if not found:
            return text
        again = written = self._render(messages, tools, settings)
        for mark, serialised, own in found:
            again, written = again.replace(mark, serialised), written.replace(mark, own)
        return written if again == text else text

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
def say_described(cure: str) -> None:
    """Once per process."""
    log.warning(
        "The chat template does not render tools, which messages describe instead; to let it"
        " render them, too, %s, or send no tools.",
        cure,
    )


def is_described(tool: dict[str, Json], text: str) -> bool:
    """Whether a prompt has a tool's name and the first line of its description, as text or in JSON;
    of a tool that has none, its name as others are written: name(, "name", `name` or name:."""
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
    return any(one in shown for one in (words, *written))


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
    """What transformers makes of a message since 5.21.1 before a template sees it, so that older
    ones render the same prompt: no keys of null, and reasoning by the names that templates read."""
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


def _arguments(given: Json) -> Json:
    """Arguments as objects: templates serialise them, and would quote a string twice. Malformed
    ones, written by the model, are left unchanged."""
    try:
        values = json.loads(given) if isinstance(given, str) else given
    except (ValueError, RecursionError):
        return given
    if isinstance(given, str) and isinstance(values, dict):
        return WrittenArguments(values, given.strip())
    return values
