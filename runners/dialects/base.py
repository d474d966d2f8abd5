"""What a dialect is: the shape of an API's errors, and how its calls become chat completions.

Policy servers give exact token ids for chat completions and completions only, so every other API
is translated: the request into a chat completion, the answer back into that API's own objects and
events. Fields are of three classes, which each dialect writes down. Those with a meaning that a
chat completion cannot express are refused. Options of the API's own server, and offers of tools
that it would run itself, are left out and recorded with the call. Always true: no message, image
or tool of the agent is ever left out.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from base64 import b64decode, b64encode
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import msgspec

from agentrl.types import Json

Body = dict[str, Json]


@dataclass(slots=True)
class ConversationMemory:
    """What later calls of an attempt may refer to."""

    answers: dict[str, list[Body]] = field(default_factory=dict)
    """Conversations as chat messages, by the id of the answer that ended them."""

    arguments: dict[str, str] = field(default_factory=dict)
    """Arguments of tool calls by their id, byte for byte as the model wrote them."""

    def remember(self, answer: Json) -> None:
        """Keep the arguments of the tool calls in a chat message of the model."""
        for id, function in _functions([answer]):
            self.arguments[id] = function.get("arguments") or ""

    def restore(self, messages: Json) -> bool:
        """Give the tool calls in chat messages the arguments as the model wrote them, where the
        agent gives back the same JSON; true if that changed any. With other white space the tokens
        would differ, and the call would not continue the one before."""
        changed = False
        for id, function in _functions(messages) if self.arguments else ():
            written, given = self.arguments.get(id), function.get("arguments")
            if written is None or written == given or not isinstance(given, str):
                continue
            if _same_json(given, written):
                function["arguments"] = written
                changed = True
        return changed


class UntranslatableError(Exception):
    """A request that its API would refuse, or that a chat completion cannot express."""

    def __init__(self, param: str, why: str, *, status: int = 400, code: str = "") -> None:
        super().__init__(f"{param}: {why}")
        self.message, self.param, self.status = f"{param}: {why}", param, status
        self.code = code or "unsupported_parameter"


class Translation(ABC):
    """One call: `chat` is what the policy server is asked, and `answer` the object of the agent's
    API that its answer becomes.

    The server's answer is given whole to `whole`, or chunk by chunk to `part` and then `end`.
    Answers that are no chat completions raise KeyError, TypeError, ValueError or AttributeError."""

    def __init__(self, chat: Body, answer: Body, *, streamed: bool) -> None:
        self.chat, self.answer = chat, answer
        if streamed:
            chat["stream_options"] = {"include_usage": True}
        self.left_out: list[str] = []  # options of the request that have no effect here
        self._events: list[bytes] = []
        self._started = False
        self._open: object = None  # which block, part or tool call is being written
        self._arguments = ""  # of the tool call, so far
        self._finish = "stop"
        self._stop_sequence: str | None = None

    def whole(self, completion: Body, prompt_tokens: int) -> bytes:
        choice = completion["choices"][0]
        chunk = {**completion, "choices": [choice | {"delta": choice["message"]}]}
        self.part(chunk, prompt_tokens)
        self.end()
        return msgspec.json.encode(self.answer)

    def part(self, chunk: Body, prompt_tokens: int) -> bytes:
        """Server-sent events, maybe none."""
        if not self._started:
            self._started = True
            self._start(chunk["model"], prompt_tokens)
        if usage := chunk.get("usage"):
            self._count(usage)
        for choice in chunk.get("choices") or ():
            delta = choice.get("delta") or {}
            thought = delta.get("reasoning_content") or delta.get("reasoning")
            said = {"reasoning_content": thought, "content": delta.get("content")}
            for key, text in (said | {"refusal": delta.get("refusal")}).items():
                if text:
                    self._write(key, text, choice)
            for position, call in enumerate(delta.get("tool_calls") or ()):
                function = call.get("function") or {}
                if self._switch(("call", call.get("index", position))):
                    self._arguments = ""
                    self._begin_call(call["id"], function["name"])
                if arguments := function.get("arguments"):
                    self._arguments += arguments
                    self._add_arguments(arguments)
            self._finish = choice.get("finish_reason") or self._finish
            if isinstance(choice.get("stop_reason"), str):  # vLLM names what stopped it
                self._stop_sequence = choice["stop_reason"]
        return self._flush()

    def end(self) -> bytes:
        """The last events, after the last chunk."""
        self._switch(None)
        self._end()
        return self._flush()

    @abstractmethod
    def _start(self, model: str, prompt_tokens: int) -> None: ...

    @abstractmethod
    def _count(self, usage: Body) -> None: ...

    @abstractmethod
    def _write(self, key: str, text: str, choice: Body) -> None:
        """`text` is added to the reasoning_content, content or refusal of the answer."""

    @abstractmethod
    def _begin_call(self, id: str, name: str) -> None:
        """A tool is called; `_arguments` are whole when `_close` is called."""

    def _add_arguments(self, arguments: str) -> None:  # noqa: B027 - few APIs show them
        """`arguments` are added to those of the tool call."""

    @abstractmethod
    def _close(self) -> None:
        """The block, part or tool call that is open has ended."""

    @abstractmethod
    def _end(self) -> None: ...

    def _switch(self, what: object) -> bool:
        """Close what is open unless it is `what`; true if `what` begins now."""
        if self._open == what:
            return False
        if self._open is not None:
            self._close()
        self._open = what
        return True

    def _event(self, kind: str, **fields: Any) -> None:
        data = msgspec.json.encode({"type": kind} | fields)
        self._events.append(f"event: {kind}\ndata: ".encode() + data + b"\n\n")

    def _flush(self) -> bytes:
        events, self._events = b"".join(self._events), []
        return events


@dataclass(frozen=True, slots=True)
class Dialect:
    route: str  # where agents post, below /v1
    api: str  # where the policy server is asked, below its base URL
    error: Callable[[int, str, str], Body]  # of HTTP status, code and message
    translate: Callable[[Body, ConversationMemory], Translation] | None = None  # None: the same API
    tells_errors: bool = False  # also in a stream that has begun, as its last event


@contextmanager
def typed() -> Iterator[None]:
    """Refuse the request if the code inside fails on a field that has not the type its API says."""
    try:
        yield
    except (AttributeError, TypeError) as error:
        why = f"a field is not of its type ({error})"
        raise UntranslatableError("request", why, code="invalid_type") from None


def refuse_unless(
    body: Mapping[str, Json], allowed: Mapping[str, tuple[Json, ...]], where: str = ""
) -> None:
    """Refuse the fields of `body`, itself at `where`, that have any but the allowed values."""
    for name, values in allowed.items():
        if name in body and body[name] not in values:
            raise impossible(f"{where}{name}", f"{body[name]!r:.80}")


def impossible(where: str, what: str) -> UntranslatableError:
    return UntranslatableError(where, f"{what} is not possible behind this gateway; leave it out")


def objects(value: Json, where: str) -> list[Body]:
    """`value` if it is a list of objects, which is empty for None."""
    if value is None:
        return []
    if not isinstance(value, list) or not all(isinstance(item, dict) for item in value):
        raise UntranslatableError(where, "is not a list of objects", code="invalid_type")
    return value


def text(value: Json, where: str) -> str:
    if not isinstance(value, str):
        raise UntranslatableError(where, "is not a string", code="invalid_type")
    return value


def joined(parts: Json, where: str) -> str:
    """The text of parts that have nothing else."""
    return "".join(text(part.get("text"), where) for part in objects(parts, where))


def _functions(messages: Json) -> Iterator[tuple[str, Body]]:
    """Id and function of each tool call in chat messages."""
    for message in messages if isinstance(messages, list) else ():
        calls = message.get("tool_calls") if isinstance(message, dict) else None
        for call in calls if isinstance(calls, list) else ():
            if isinstance(call, dict) and isinstance(function := call.get("function"), dict):
                yield str(call.get("id")), function


def _same_json(given: str, written: str) -> bool:
    try:
        return bool(msgspec.json.decode(given or "{}") == msgspec.json.decode(written or "{}"))
    except (msgspec.DecodeError, RecursionError):
        return False


def data_event(body: Body) -> bytes:
    return b"data: " + msgspec.json.encode(body) + b"\n\n"


def tool_call(id: Json, name: Json, arguments: Json) -> Body:
    """As an assistant's chat message has it."""
    return {"id": id, "type": "function", "function": {"name": name, "arguments": arguments}}


SEALED = "agentrl:"


def seal(thought: str) -> str:
    """Reasoning as text that an agent gives back without reading it."""
    return SEALED + b64encode(thought.encode()).decode()


def unseal(given: Json) -> str:
    """The reasoning in such a text; empty if it is none."""
    if not isinstance(given, str) or not given.startswith(SEALED):
        return ""
    try:
        return b64decode(given.removeprefix(SEALED), validate=True).decode()
    except ValueError:
        return ""


def error(status: int, code: str, message: str) -> Body:
    """https://platform.openai.com/docs/guides/error-codes"""
    server = "server_error" if status >= 500 else "invalid_request_error"
    kind = "rate_limit_error" if status == 429 else server
    return {"error": {"message": message, "type": kind, "param": None, "code": code}}


# The APIs that policy servers speak themselves.
CHAT = Dialect("chat/completions", "chat/completions", error)
TEXT = Dialect("completions", "completions", error)
