"""OpenAI's Responses API on top of chat completions.

Function tools, parallel calls, reasoning, structured output and `previous_response_id` within one
attempt are translated. Built-in tools, files and server-side conversations are refused.
Source: https://platform.openai.com/docs/api-reference/responses
"""

from __future__ import annotations

import time
from uuid import uuid4

import msgspec

from agentrl.runners.dialects.base import (
    Body,
    ConversationMemory,
    Dialect,
    UntranslatableError,
    event,
    objects,
    refuse_unless,
    text,
)
from agentrl.runners.dialects.openai import error
from agentrl.types import Json

# Fields that change the answer in a way a chat completion cannot, but for these values.
ALLOWED: dict[str, tuple[Json, ...]] = {
    "background": (None, False),
    "context_management": (None, []),
    "conversation": (None,),
    "moderation": (None,),
    "prompt": (None,),
    "truncation": (None, "auto", "disabled"),  # a prompt that is too long is refused either way
}
# Fields without a meaning once those are refused: limits of built-in tools, hints to caches, what
# is kept beside an answer. Others that leave it as it is, such as `service_tier` and `user`, chat
# completions have too, and they are passed on.
IDLE = {"access_programs", "background_options", "image", "max_tool_calls", "metadata"}
IDLE |= {"prompt_cache_options", "store", "stream_options"}
TRANSLATED = {"include", "input", "instructions", "max_output_tokens", "previous_response_id"}
TRANSLATED |= {"reasoning", "text", "tool_choice", "tools"}
LOGPROBS = "message.output_text.logprobs"
# What else an answer may include: the reasoning is in it as it is, and the others are of built-in
# tools or of what the agent itself said.
INCLUDED = {"reasoning.encrypted_content", "message.input_image.image_url"}
INCLUDED |= {"code_interpreter_call.outputs", "computer_call_output.output.image_url"}
INCLUDED |= {"file_search_call.results", "web_search_call.action.sources"}
INCLUDED |= {"web_search_call.results"}
# Of `reasoning`, as in `ALLOWED`; its summary would come beside the answer, and is left out.
REASONING: dict[str, tuple[Json, ...]] = {"context": (None, "auto"), "mode": (None, "standard")}
UNSAID = {"generate_summary", "summary"}
REASONS = {"length": "max_output_tokens", "content_filter": "content_filter"}

# By the key of a chat message: type of the item, of its part, and the part's field.
PARTS = {
    "reasoning_content": ("reasoning", "reasoning_text", "text"),
    "content": ("message", "output_text", "text"),
    "refusal": ("message", "refusal", "refusal"),
}


# -- the request -----------------------------------------------------------------------------------


def chat_request(body: Body, earlier: list[Body]) -> Body:
    """The chat completion that a request asks for, behind the `earlier` messages."""
    refuse_unless(body, ALLOWED)
    chat = {k: v for k, v in body.items() if k not in ALLOWED.keys() | IDLE | TRANSLATED}
    instructions = body.get("instructions")
    system = [] if instructions is None else [{"role": "system", "content": instructions}]
    chat["messages"] = [*system, *earlier, *_messages(body.get("input"))]
    if not chat["messages"]:
        raise UntranslatableError("input", "is missing; say something", code="missing_parameter")
    if body.get("max_output_tokens") is not None:
        chat["max_completion_tokens"] = body["max_output_tokens"]
    if tools := [_tool(tool, i) for i, tool in enumerate(objects(body.get("tools"), "tools"))]:
        chat["tools"] = tools
    if (choice := body.get("tool_choice")) is not None:
        chat["tool_choice"] = _tool_choice(choice)
    for item in body.get("include") or ():
        if item != LOGPROBS and item not in INCLUDED:
            raise UntranslatableError("include", f"{item!r:.80} does not exist behind this gateway")
        if item == LOGPROBS:
            chat["logprobs"] = True
    return chat | _format(body.get("text") or {}) | _reasoning(body.get("reasoning") or {})


def _tool(tool: Body, index: int) -> Body:
    if tool.get("type") != "function":
        what = f"{tool.get('type')!r:.80} runs on OpenAI's servers; only functions are possible"
        raise UntranslatableError(f"tools[{index}].type", what)
    return {"type": "function", "function": {k: v for k, v in tool.items() if k != "type"}}


def _tool_choice(choice: Json) -> Json:
    if isinstance(choice, str):
        return choice
    if isinstance(choice, dict) and choice.get("type") == "function":
        return {"type": "function", "function": {"name": choice.get("name")}}
    raise UntranslatableError("tool_choice", f"{choice!r:.80} is not possible behind this gateway")


def _format(options: Body) -> Body:
    chat = {"verbosity": options["verbosity"]} if options.get("verbosity") else {}
    wanted = dict(options.get("format") or {"type": "text"})
    kind = wanted.pop("type", None)
    if kind == "text":
        return chat
    if kind == "json_schema":
        return chat | {"response_format": {"type": kind, kind: wanted}}
    return chat | {"response_format": {"type": kind} | wanted}


def _reasoning(options: Body) -> Body:
    refuse_unless(options, REASONING, "reasoning.")
    known = REASONING.keys() | UNSAID
    given = {k: v for k, v in options.items() if v is not None and k not in known}
    effort = given.pop("effort", None)
    if given:
        raise UntranslatableError(
            "reasoning", f"{', '.join(sorted(given))} is not possible behind this gateway"
        )
    return {} if effort is None else {"reasoning_effort": effort}


def _messages(items: Json) -> list[Body]:
    """Input items as chat messages: what the assistant did in one turn is one message."""
    if isinstance(items, str):
        return [{"role": "user", "content": items}]
    made: list[Body] = []
    for index, item in enumerate(objects(items, "input")):
        _add(made, item, f"input[{index}]")
    return made


def _add(made: list[Body], item: Body, where: str) -> None:
    kind = item.get("type", "message")
    if kind == "message":
        role, content = text(item.get("role"), f"{where}.role"), item.get("content")
        content = _content(content, f"{where}.content", plain=role == "assistant")
        if role == "assistant" and "content" not in (turn := _turn(made)):
            turn["content"] = content
        else:
            made.append({"role": role, "content": content})
    elif kind == "function_call":
        turn = _turn(made)
        turn.setdefault("content", None)
        function = {"name": item.get("name"), "arguments": item.get("arguments")}
        call = {"id": item.get("call_id"), "type": "function", "function": function}
        turn.setdefault("tool_calls", []).append(call)
    elif kind == "function_call_output":
        said = _content(item.get("output"), f"{where}.output", plain=True)
        made.append({"role": "tool", "tool_call_id": item.get("call_id"), "content": said})
    elif kind == "reasoning":
        thoughts = objects(item.get("content"), f"{where}.content")
        if not thoughts:
            raise UntranslatableError(where, "encrypted reasoning is of no use to this model")
        said = "".join(text(part.get("text"), f"{where}.content") for part in thoughts)
        made.append({"role": "assistant", "reasoning_content": said})
    else:
        raise UntranslatableError(where, f"an item of type {kind!r:.80} is not possible here")


def _turn(made: list[Body]) -> Body:
    """The assistant's message that is still being put together, or a new one."""
    last = made[-1] if made else {}
    if last.get("role") != "assistant":
        made.append({"role": "assistant"})
    return made[-1]


def _content(content: Json, where: str, *, plain: bool) -> Json:
    if isinstance(content, str):
        return content
    parts: list[Body] = []
    for part in objects(content, where):
        kind = part.get("type")
        if kind in ("input_text", "output_text", "text"):
            parts.append({"type": "text", "text": text(part.get("text"), where)})
        elif kind == "refusal":
            parts.append({"type": "text", "text": text(part.get("refusal"), where)})
        elif kind == "input_image" and part.get("image_url") and not plain:
            url: Body = {"url": part["image_url"]}
            if part.get("detail"):
                url["detail"] = part["detail"]
            parts.append({"type": "image_url", "image_url": url})
        else:
            raise UntranslatableError(where, f"a part of type {kind!r:.80} is not possible here")
    if all(part["type"] == "text" for part in parts):
        return "".join(part["text"] for part in parts)
    return parts


# -- the answer ------------------------------------------------------------------------------------


class ResponsesTranslation:
    """A `Translation`. A whole answer is a stream whose events nobody reads."""

    def __init__(self, body: Body, memory: ConversationMemory) -> None:
        previous = body.get("previous_response_id")
        if previous is not None and previous not in memory.answers:
            why = f"{previous!r:.80} is none that this attempt was answered with and had stored"
            raise UntranslatableError(
                "previous_response_id", why, code="previous_response_not_found"
            )
        earlier = [] if previous is None else memory.answers[previous]
        self.chat = chat_request(body, earlier)
        if body.get("stream"):
            self.chat["stream_options"] = {"include_usage": True}
        self._memory = memory if body.get("store") is not False else ConversationMemory()
        self._said = self.chat["messages"][body.get("instructions") is not None :]
        self._response = _envelope(body)
        self._items: list[Body] = self._response["output"]
        self._events: list[bytes] = []
        self._count = 0
        self._open: tuple[object, ...] | None = None  # which part or call is being written
        self._finish = "stop"

    def whole(self, answer: Body, prompt_tokens: int) -> bytes:
        choice = answer["choices"][0]
        self.part({**answer, "choices": [choice | {"delta": choice["message"]}]}, prompt_tokens)
        self.end()
        return msgspec.json.encode(self._response)

    def part(self, chunk: Body, prompt_tokens: int) -> bytes:
        if not self._count:
            self._response["model"] = chunk["model"]
            self._event("response.created", response=self._response)
            self._event("response.in_progress", response=self._response)
        if chunk.get("usage"):
            self._response["usage"] = _usage(chunk["usage"])
        for choice in chunk.get("choices") or ():
            delta = choice.get("delta") or {}
            thought = delta.get("reasoning_content") or delta.get("reasoning")
            said = delta | {"reasoning_content": thought}
            for key in PARTS:
                if said.get(key):
                    self._say(key, said[key], choice.get("logprobs") or {})
            for position, call in enumerate(delta.get("tool_calls") or ()):
                self._call(call.get("index", position), call)
            self._finish = choice.get("finish_reason") or self._finish
        return self._flush()

    def end(self) -> bytes:
        self._close()
        reason = REASONS.get(self._finish)
        status = "incomplete" if reason else "completed"
        self._response["status"] = status
        if reason:
            self._response["incomplete_details"] = {"reason": reason}
        else:
            self._response["completed_at"] = int(time.time())
        self._memory.answers[self._response["id"]] = [*self._said, *_messages(self._items)]
        self._event(f"response.{status}", response=self._response)
        return self._flush()

    def _say(self, key: str, said: str, logprobs: Body) -> None:
        kind, part_type, field = PARTS[key]
        if self._open != (key,):
            self._close()
            self._open = (key,)
            item: Body = {"type": kind, "id": _id("rs" if kind == "reasoning" else "msg")}
            item |= {"status": "in_progress", "content": []}
            extra: Body = {"summary": []} if kind == "reasoning" else {"role": "assistant"}
            item |= extra
            self._add_item(item)
            part: Body = {"type": part_type, field: ""}
            if part_type == "output_text":
                part |= {"annotations": [], "logprobs": []}
            self._event("response.content_part.added", part=part, **self._where(content_index=0))
            item["content"].append(part)
        part = self._items[-1]["content"][0]
        part[field] += said
        where = self._where(content_index=0)
        if "logprobs" in part:
            where["logprobs"] = logprobs.get("content") or []
            part["logprobs"] += where["logprobs"]
        self._event(f"response.{part_type}.delta", delta=said, **where)

    def _call(self, index: int, delta: Body) -> None:
        function = delta.get("function") or {}
        if self._open != ("call", index):
            self._close()
            self._open = ("call", index)
            item = {"type": "function_call", "id": _id("fc"), "status": "in_progress"}
            item |= {"call_id": delta["id"], "name": function["name"], "arguments": ""}
            self._add_item(item)
        said = function.get("arguments") or ""
        self._items[-1]["arguments"] += said
        if said:
            self._event("response.function_call_arguments.delta", delta=said, **self._where())

    def _add_item(self, item: Body) -> None:
        self._items.append(item)
        self._event("response.output_item.added", item=item, output_index=len(self._items) - 1)

    def _close(self) -> None:
        if self._open is None:
            return
        self._open = None
        item = self._items[-1]
        item["status"] = "completed" if self._finish not in REASONS else "incomplete"
        if item["type"] == "function_call":
            said = {"arguments": item["arguments"], "name": item["name"]}
            self._event("response.function_call_arguments.done", **said, **self._where())
        else:
            (part,) = item["content"]
            where = self._where(content_index=0)
            said = {k: v for k, v in part.items() if k not in ("type", "annotations")}
            self._event(f"response.{part['type']}.done", **said, **where)
            self._event("response.content_part.done", part=part, **where)
        self._event("response.output_item.done", item=item, output_index=len(self._items) - 1)

    def _where(self, **extra: int) -> Body:
        item = self._items[-1]["id"]
        return {"item_id": item, "output_index": len(self._items) - 1} | extra

    def _event(self, kind: str, **fields: Json) -> None:
        self._events.append(event({"type": kind, "sequence_number": self._count} | fields))
        self._count += 1

    def _flush(self) -> bytes:
        events, self._events = b"".join(self._events), []
        return events


def _envelope(body: Body) -> Body:
    """A response before it says anything; what the request left open as OpenAI fills it."""
    defaults: Body = {"max_output_tokens": None, "max_tool_calls": None, "metadata": {}}
    defaults |= {"instructions": None, "parallel_tool_calls": True, "previous_response_id": None}
    defaults |= {"prompt_cache_key": None, "safety_identifier": None, "service_tier": "default"}
    defaults |= {"store": True, "temperature": 1.0, "tool_choice": "auto", "tools": []}
    defaults |= {"top_logprobs": 0, "top_p": 1.0, "truncation": "disabled", "user": None}
    defaults["text"] = {"format": {"type": "text"}}
    defaults["reasoning"] = {"effort": None, "summary": None}
    echoed = {k: v if body.get(k) is None else body[k] for k, v in defaults.items()}
    head: Body = {"id": _id("resp"), "object": "response", "created_at": int(time.time())}
    head |= {"status": "in_progress", "background": False, "error": None, "model": ""}
    return head | {"incomplete_details": None, "output": [], "usage": None} | echoed


def _usage(usage: Body) -> Body:
    cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0
    thought = (usage.get("completion_tokens_details") or {}).get("reasoning_tokens") or 0
    return {
        "input_tokens": usage["prompt_tokens"],
        "input_tokens_details": {"cached_tokens": cached, "cache_write_tokens": 0},
        "output_tokens": usage["completion_tokens"],
        "output_tokens_details": {"reasoning_tokens": thought},
        "total_tokens": usage["prompt_tokens"] + usage["completion_tokens"],
    }


def _id(prefix: str) -> str:
    return f"{prefix}_{uuid4().hex}"


DIALECT = Dialect("responses", "chat/completions", error, ResponsesTranslation)
