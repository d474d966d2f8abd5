"""The base of the translated APIs: answers while they are built, the agent's tools, refusals.

Policy servers return exact token ids only for chat completions and completions, so every other API
is translated: the request into a chat completion, the response back into that API's objects and
events. Each module lists two classes of fields that it does not translate. Fields that a chat
completion cannot express are refused. Options of the API's own server, and hosted tools that this
server would run itself, are dropped and recorded with the call. Invariant: no message, image or
tool of the agent is ever dropped.

Tools of a Responses request become functions, and calls of them are translated back. A tool in a
namespace becomes the function `namespace__name`; a custom tool, whose input is plain text, a
function with the single argument `input`. Tools that run on the agent's machine are offered to the
model or refused; only tools that run on OpenAI's servers are dropped.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from base64 import b64decode, b64encode
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple
from uuid import uuid4

import msgspec
from msgspec import UNSET, UnsetType

from agentrl.core.types import Json
from agentrl.runners.apis import base
from agentrl.runners.apis.base import UntranslatableError
from agentrl.runners.apis.chat import Body, ToolCalls, is_complete


@dataclass(slots=True, eq=False)
class Block:
    """Text of an answer that has not been written yet, or a tool call that may continue."""

    key: str = ""  # field of the text: reasoning_content, content or refusal
    text: str = ""
    choice: Body = field(default_factory=dict)  # the source of the text, with log-probs
    call: Body | None = None


class ChatTranslation(ABC):
    """One call: `chat` is the request to the policy server, `answer` the response object in the
    agent's API.

    Pass a complete response to `whole`, or each chunk to `part` and then call `end`. A response
    that is not a chat completion raises KeyError, TypeError, ValueError or AttributeError."""

    def __init__(self, chat: Body, answer: Body, *, streamed: bool) -> None:
        self.chat, self.answer = chat, answer
        if streamed:
            chat["stream_options"] = {"include_usage": True}
        self.ignored: list[str] = []  # options of the request that are dropped
        self._events: list[bytes] = []
        self._started = False
        # Index of the choice that the agent gets, if there are several.
        self._index: Json | UnsetType = UNSET
        self._calls = ToolCalls()
        self._pending: list[Block] = []  # a call that may continue, and the blocks after it
        self._open: object = None  # the block, part or tool call in progress
        self._arguments = ""  # arguments of the current tool call, so far
        self._finish = "stop"
        self._stop_sequence: str | None = None

    @property
    def begun(self) -> bool:
        """Whether a part of a response was read, so that this object cannot be used for another
        one."""
        return self._started

    def whole(self, completion: Body, prompt_tokens: int) -> bytes:
        choice = completion["choices"][0]
        message = dict(choice["message"])
        if calls := message.get("tool_calls"):  # each is a complete call, with any index
            message["tool_calls"] = [{**call, "index": i} for i, call in enumerate(calls)]
        chunk = {**completion, "choices": [choice | {"delta": message}]}
        self.part(chunk, prompt_tokens)
        self.end()
        return msgspec.json.encode(self.answer)

    def part(self, chunk: Body, prompt_tokens: int) -> bytes:
        """Return the server-sent events of a chunk, possibly none."""
        if not self._started:
            self._started = True
            self._start(chunk["model"], prompt_tokens)
        if self._index is UNSET and chunk.get("choices"):
            self._index = chunk["choices"][0].get("index")
        if usage := chunk.get("usage"):
            self._count(usage)
        for choice in chunk.get("choices") or ():
            if choice.get("index") != self._index:
                continue
            delta = choice.get("delta") or {}
            thought = delta.get("reasoning_content") or delta.get("reasoning")
            texts = {"reasoning_content": thought, "content": delta.get("content")}
            for key, text in (texts | {"refusal": delta.get("refusal")}).items():
                if text:
                    self._pending.append(Block(key, text, choice))
            for piece in delta.get("tool_calls") or ():
                before = len(self._calls.all)
                self._calls.add(piece)
                self._pending += [Block(call=call) for call in self._calls.all[before:]]
            self._advance()
            self._finish = choice.get("finish_reason") or self._finish
            if isinstance(choice.get("stop_reason"), str):  # vLLM: the stop sequence that matched
                self._stop_sequence = choice["stop_reason"]
        return self._flush()

    def end(self) -> bytes:
        """Return the events that follow the last chunk."""
        self._advance(ended=True)
        self._switch(None)
        self._end()
        return self._flush()

    def _advance(self, *, ended: bool = False) -> None:
        """Write pending blocks in order. A call is written as it grows; blocks after it wait until
        the call is complete, because a server may alternate between calls."""
        while self._pending:
            block, over = self._pending[0], ended
            if block.call is None:
                self._write(block.key, block.text, block.choice)
            else:
                arguments = block.call["function"]["arguments"]
                over = over or (len(self._pending) > 1 and is_complete(arguments))
                self._write_call(block, block.call, over=over)
                if not over:
                    return
            del self._pending[0]

    def _write_call(self, block: Block, call: Body, *, over: bool) -> None:
        """Write the new part of a call, once its name is known; the name may arrive in several
        parts."""
        name, arguments = call["function"]["name"], call["function"]["arguments"]
        if not (over or (name and arguments)):
            return
        if self._switch(block):
            self._arguments = ""
            self._begin_call(call.get("id") or f"call_{uuid4().hex}", name)
        if more := arguments[len(self._arguments) :]:
            self._arguments = arguments
            self._add_arguments(more)

    @abstractmethod
    def _start(self, model: str, prompt_tokens: int) -> None: ...

    @abstractmethod
    def _count(self, usage: Body) -> None: ...

    @abstractmethod
    def _write(self, key: str, text: str, choice: Body) -> None:
        """Append `text` to the answer's `key`: reasoning_content, content or refusal."""

    @abstractmethod
    def _begin_call(self, id: str, name: str) -> None:
        """Begin a tool call; `_arguments` is complete when `_close` is called."""

    def _add_arguments(self, arguments: str) -> None:  # noqa: B027 - few APIs stream arguments
        """Append `arguments` to those of the current tool call."""

    @abstractmethod
    def _close(self) -> None:
        """End the current block, part or tool call."""

    @abstractmethod
    def _end(self) -> None: ...

    def _switch(self, block: object) -> bool:
        """End the current block unless it is `block`; return whether `block` is new."""
        if self._open == block:
            return False
        if self._open is not None:
            self._close()
        self._open = block
        return True

    def _event(self, kind: str, **fields: Any) -> None:
        data = msgspec.json.encode({"type": kind} | fields)
        self._events.append(f"event: {kind}\ndata: ".encode() + data + b"\n\n")

    def _flush(self) -> bytes:
        events, self._events = b"".join(self._events), []
        return events


def refuse_unless(
    body: Mapping[str, Json], allowed: Mapping[str, tuple[Json, ...]], where: str = ""
) -> None:
    """Refuse fields of `body`, which is at path `where`, with any other than the allowed values."""
    for name, values in allowed.items():
        if name in body and body[name] not in values:
            raise impossible(f"{where}{name}", f"{body[name]!r:.80}")


def impossible(where: str, what: str) -> UntranslatableError:
    return UntranslatableError(where, f"{what} is not possible behind this gateway; leave it out")


def image(url: Json, **about: Json) -> Body:
    """Build a part of a chat message that is an image."""
    return {"type": "image_url", "image_url": {"url": url, **about}}


def content(parts: list[Body]) -> Json:
    """Return parts as the content of a chat message: one text, unless there are images."""
    if all(part["type"] == "text" for part in parts):
        return "".join(part["text"] for part in parts)
    return parts


class Turns:
    """Builds the messages of a chat completion. Text and calls of the assistant are separate
    messages, which `ConversationMemory.recall` joins to a turn."""

    def __init__(self, earlier: Iterable[Body] = ()) -> None:
        self.messages = list(earlier)
        self._run = 0  # neighbouring assistant messages
        self._calls: dict[str, tuple[str, int]] = {}  # id -> name and run
        self._answered: set[str] = set()
        for message in self.messages:
            for call in message.get("tool_calls") or ():
                self._calls[str(call["id"])] = call["function"]["name"], self._run

    def add(self, role: str, content: Json) -> None:
        self.messages.append({"role": role, "content": content})
        self._run += role != "assistant"

    def think(self, thought: str) -> None:
        self.messages.append({"role": "assistant", "reasoning_content": thought})

    def call(self, id: Json, name: Json, arguments: Json) -> None:
        """Add a tool call of the assistant."""
        function = {"name": name, "arguments": arguments}
        calls = [{"id": id, "type": "function", "function": function}]
        self.messages.append({"role": "assistant", "content": None, "tool_calls": calls})
        self._calls[str(id)] = str(name), self._run

    def add_result(self, id: Json, output: Json, where: str, *, name: Json = None) -> None:
        """Add the result of a call; reject a result without a call. `name`: of the call, in APIs
        that allow results without an id."""
        if name is not None and str(id) not in self._calls:
            id = self._unanswered(name)
        if str(id) not in self._calls:
            call = f"of {name!r:.80}" if id is None else f"{id!r:.80}"
            why = f"there is no call {call} before this result; send the call that it answers, too"
            raise UntranslatableError(where, why, code="no_tool_call")
        self._answered.add(str(id))
        self.messages.append({"role": "tool", "tool_call_id": id, "content": output})
        self._run += 1

    def _unanswered(self, name: Json) -> str | None:
        """Return the first unanswered call of a function in the latest turn that has one."""
        calls = {id: call for id, call in self._calls.items() if id not in self._answered}
        latest = max((run for called, run in calls.values() if called == name), default=0)
        return next((id for id, call in calls.items() if call == (name, latest)), None)


SEALED = b"agentrl:"


def seal(thought: str) -> str:
    """Encode reasoning as an opaque text that the agent sends back unread: base64, which clients
    decode."""
    return b64encode(SEALED + thought.encode()).decode()


def unseal(text: Json) -> str:
    """Decode the reasoning in a sealed text; empty for anything else."""
    try:
        sealed = b64decode(padded(text), validate=True) if isinstance(text, str) else b""
        return sealed.removeprefix(SEALED).decode() if sealed.startswith(SEALED) else ""
    except ValueError:
        return ""


def padded(base64: str) -> str:
    """Return base64 in the usual alphabet and with its padding; SDKs write the URL-safe
    alphabet."""
    usual = base64.rstrip("=").replace("-", "+").replace("_", "/")
    return usual + "=" * (-len(usual) % 4)


def thought_of(shown: str, written: str) -> str:
    """Return the reasoning that the agent sent back (`shown`), as `written` by the model if that is
    known, unless the agent changed more than the surrounding white space."""
    return written if written and shown.strip() in ("", written.strip()) else shown


SEPARATOR = "__"
HOSTED = {"code_interpreter", "file_search", "image_generation", "mcp", "programmatic_tool_calling"}
HOSTED |= {"web_search", "web_search_2025_08_26", "web_search_preview"}
HOSTED |= {"web_search_preview_2025_03_11"}
# Fields of tools that are used. Other fields are options of OpenAI's server, and are recorded.
READ = {"namespace": {"type", "name", "tools"}}
READ["function"] = {"type", "name", "description", "parameters", "strict"}
READ["custom"] = {"type", "name", "description", "format"}
INPUT: Body = {"type": "object", "properties": {"input": {"type": "string"}}}
INPUT |= {"required": ["input"], "additionalProperties": False}


class Origin(NamedTuple):
    """The agent's tool behind a function that the model is offered."""

    kind: str  # function or custom
    name: str
    namespace: str


class ClientTools:
    """The tools of a request; if two have the same name, the later one."""

    def __init__(self) -> None:
        self.ignored: list[str] = []
        self._functions: dict[str, Body] = {}
        self._origins: dict[str, Origin] = {}

    def add(self, tools: Json, where: str, namespace: str = "") -> None:
        for index, tool in enumerate(base.objects(tools, where)):
            path, kind = f"{where}[{index}]", tool.get("type")
            if kind in READ:
                unread = sorted(name for name in tool.keys() - READ[kind] if tool[name])
                self.ignored += [f"tools.{kind}.{name}" for name in unread]
            if kind == "namespace" and not namespace:
                self.add(tool.get("tools"), f"{path}.tools", base.text(tool.get("name"), path))
            elif kind in ("function", "custom"):
                self._add(tool, path, namespace)
            elif kind in HOSTED:
                self.ignored.append(f"{where}: {kind}")
            else:
                what = f"{kind!r:.80} is not possible behind this gateway"
                raise UntranslatableError(f"{path}.type", f"{what}; offer it as a function")

    @property
    def chat(self) -> list[Body]:
        """The `tools` of the chat completion."""
        return [{"type": "function", "function": function} for function in self._functions.values()]

    def item(self, function: str) -> Body:
        """Return the first fields of the output item for a call of `function`."""
        kind, name, namespace = self._origins.get(function) or Origin("function", function, "")
        item: Body = {"type": f"{kind}_tool_call" if kind == "custom" else "function_call"}
        return item | {"name": name} | ({"namespace": namespace} if namespace else {})

    def _add(self, tool: Body, where: str, namespace: str) -> None:
        name = base.text(tool.get("name"), f"{where}.name")
        fields = READ[tool["type"]] - {"type", "format"}
        function = {k: v for k, v in tool.items() if k in fields}
        if tool["type"] == "custom":
            function |= {"parameters": INPUT}
            if (syntax := tool.get("format") or {}).get("type") == "grammar":
                rules = f"The input follows this grammar ({syntax.get('syntax')}):"
                lines = [function.get("description"), f"{rules}\n{syntax.get('definition')}"]
                function["description"] = "\n\n".join(filter(None, lines))
        function["name"] = flat = flat_name(name, namespace)
        self._functions[flat] = function
        self._origins[flat] = Origin(tool["type"], name, namespace)


def flat_name(name: Json, namespace: Json) -> Json:
    """Return the function name of a tool."""
    return f"{namespace}{SEPARATOR}{name}" if namespace else name


def custom_input(arguments: str) -> str:
    """Extract a custom tool's input from the function's arguments; malformed arguments as is."""
    try:
        return str(msgspec.json.decode(arguments, type=dict[str, str])["input"])
    except (msgspec.DecodeError, KeyError):
        return arguments


def arguments_of(value: str, written: str | None) -> str:
    """Return the function's arguments for a custom tool's input `value`: the text that the model
    has `written` if it is equivalent."""
    if written is not None and custom_input(written) == value:
        return written
    return msgspec.json.encode({"input": value}).decode()
