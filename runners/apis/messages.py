"""Anthropic's Messages API on top of chat completions.

Text, images, client tools, parallel calls, thinking and structured output are translated. Tools
that run on Anthropic's servers are dropped; documents and prefilled answers are rejected.
Source: https://docs.anthropic.com/en/api/messages
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any
from uuid import uuid4

import msgspec

from agentrl.core.types import Json
from agentrl.runners.apis import base, common
from agentrl.runners.apis.base import Dialect, UntranslatableError
from agentrl.runners.apis.chat import Body, ConversationMemory

# Fields that a chat completion cannot express, with the values at which they have no effect. Any
# other value is refused.
ALLOWED: dict[str, tuple[Json, ...]] = {
    "compaction": (None,),
    "container": (None,),
    "inference_geo": (None,),
    "mcp_servers": (None, []),
    "service_tier": (None, "auto", "standard_only"),
    "speed": (None, "standard"),
}
# Server options, dropped. `context_management` lets the server clear earlier thinking and tool
# results; here the policy reads all that the agent sends.
IDLE = {"cache_control", "context_management", "diagnostics", "metadata", "user_profile_id"}
IDLE |= {"billing_policy", "fallback_credit_token", "fallbacks", "workspace_id"}
EDITS = {"clear_thinking_20251015", "clear_tool_uses_20250919"}  # edits of `context_management`
# Type prefixes of tools that run on Anthropic's servers, dropped.
HOSTED = ("code_execution_", "web_fetch_", "web_search_")
TRANSLATED = {"max_tokens", "messages", "output_config", "output_format", "stop_sequences"}
TRANSLATED |= {"system", "thinking", "thread", "tool_choice", "tools"}
TYPES = {401: "authentication_error", 403: "permission_error", 404: "not_found_error"}
TYPES |= {413: "request_too_large", 429: "rate_limit_error", 503: "overloaded_error"}
TYPES |= {504: "timeout_error", 529: "overloaded_error"}
CHOICES = {"auto": "auto", "any": "required", "none": "none"}
STOPS = {"length": "max_tokens", "tool_calls": "tool_use", "content_filter": "refusal"}
THREAD_LOST = "thread_not_found"  # after this error the SDK sends the whole conversation
KEPT = ("system", "tools")  # fields that a continued thread need not repeat
# Fields that are read of tools, options, messages, and blocks by their type. Other fields have no
# effect on the policy, and are listed as ignored; `cache_control` never changes an answer.
READ = {"messages": {"role", "content"}, "output_config": {"effort", "format"}}
READ["messages.system"] = READ["messages"] | {"output_config", "clear_at"}
READ["messages.output_config"] = {"effort"}
READ["tools"] = {"name", "description", "strict", "input_schema", "type", "cache_control"}
READ["tool_choice"] = {"type", "name", "disable_parallel_tool_use"}
READ["text"] = {"type", "text", "cache_control"}
READ["image"] = {"type", "source", "cache_control"}
READ["thinking"] = {"type", "thinking", "signature"}
READ["tool_use"] = {"type", "id", "name", "input", "cache_control"}
READ["tool_result"] = {"type", "tool_use_id", "content", "is_error", "cache_control"}
BROKEN = "INVALID_JSON"  # Anthropic's key for arguments that are not an object
FAILED = "Error: "  # prefix of a failed tool's result; a chat completion has no such field


def error(status: int, code: str, message: str) -> Body:
    """https://docs.anthropic.com/en/api/errors"""
    kind = TYPES.get(status, "invalid_request_error" if status < 500 else "api_error")
    fields: Body = {"type": kind, "message": message}
    if code == THREAD_LOST:
        fields["details"] = {"error_code": code}
    return {"type": "error", "error": fields, "request_id": None}


# -- the request -----------------------------------------------------------------------------------


def chat_request(body: Body, memory: ConversationMemory) -> Body:
    common.refuse_unless(body, ALLOWED)
    body = _with_thread(body, memory)
    chat = {k: v for k, v in body.items() if k not in ALLOWED.keys() | IDLE | TRANSLATED}
    for name in ("max_tokens", "messages"):
        if not body.get(name):
            raise UntranslatableError(name, "Field required", code="missing_parameter")
    chat["max_completion_tokens"] = body["max_tokens"]
    turns = common.Turns()
    if body.get("system") is not None:
        turns.add("system", _text(body["system"], "system"))
    effort = (body.get("output_config") or {}).get("effort")
    messages = base.objects(body["messages"], "messages")
    users = [index for index, message in enumerate(messages) if message.get("role") == "user"]
    for index, message in enumerate(messages):
        config = (message.get("output_config") or {}) if message.get("role") == "system" else {}
        effort = config.get("effort") or effort  # from this turn on
        if config and not message.get("content"):
            continue
        if message.get("clear_at") == "next_user_message" and users and index < users[-1]:
            continue
        _add(turns, message, f"messages[{index}]")
    chat["messages"] = turns.messages
    if chat["messages"][-1]["role"] == "assistant":
        reason = "the last message is the assistant's; prefilling an answer is not supported"
        raise UntranslatableError("messages", reason)
    if body.get("stop_sequences"):
        chat["stop"] = body["stop_sequences"]
    for index, edit in enumerate((body.get("context_management") or {}).get("edits") or ()):
        if edit.get("type") not in EDITS:
            raise common.impossible(
                f"context_management.edits[{index}]", f"{edit.get('type')!r:.80}"
            )
    offered = enumerate(base.objects(body.get("tools"), "tools"))
    if tools := [_tool(tool, index) for index, tool in offered if not _hosted(tool)]:
        chat["tools"] = tools
    kind = (body.get("thinking") or {}).get("type")
    if kind not in (None, "adaptive", "enabled", "disabled"):
        raise common.impossible("thinking", f"{kind!r:.80}")
    if effort:
        chat["reasoning_effort"] = effort
    if output_format := _format(body):
        schema = {"name": "answer", "schema": output_format.get("schema"), "strict": True}
        chat["response_format"] = {"type": "json_schema", "json_schema": schema}
    choice = body.get("tool_choice") or {}
    if not tools and choice.get("type") in ("auto", "none"):
        return chat
    return chat | _tool_choice(choice)


def _format(body: Body) -> Body:
    """Return the format of the answer; `output_format` is the field's name in the API's beta."""
    current, beta = (body.get("output_config") or {}).get("format"), body.get("output_format")
    if current and beta:
        reason = "output_config.format is set, too; leave one out"
        raise UntranslatableError("output_format", reason)
    return current or beta or {}


def _with_thread(body: Body, memory: ConversationMemory) -> Body:
    """Return the request with the earlier messages, system prompt and tools of the thread that it
    continues; the SDK's tool runner sends only new messages."""
    thread = body.get("thread") or {"type": "create"}
    if thread.get("type") == "create":
        return body
    previous = thread.get("previous_message_id")
    if thread.get("type") != "continue" or not isinstance(previous, str):
        raise common.impossible("thread", f"{thread!r:.80}")
    if repeated := [name for name in KEPT if body.get(name)]:
        raise common.impossible(repeated[0], "a change of what the thread was created with")
    if previous not in memory.kept["threads"]:
        reason = f"{previous!r:.80} is not a message of a thread of this attempt"
        raise UntranslatableError(
            "thread.previous_message_id", reason, status=404, code=THREAD_LOST
        )
    earlier: Body = memory.kept["threads"][previous]
    added = base.objects(body.get("messages"), "messages")
    return body | earlier | {"messages": [*earlier["messages"], *added]}


def prompt_of(body: Body, memory: ConversationMemory) -> Body:
    """Return the chat completion whose prompt a count_tokens request counts."""
    with base.typed():
        return chat_request(body | {"max_tokens": 1}, memory)


def ignored(body: Body) -> list[str]:
    """List the request's options that have no effect, and its hosted tools."""
    options = [name for name in sorted(IDLE & body.keys()) if body[name]]
    # The policy decides when to think, and how long; its reasoning is shown.
    thinking = body.get("thinking") or {}
    if thinking.get("type") == "disabled" or thinking.get("display") == "omitted":
        options.append("thinking")
    options += [
        f"thinking.{k}" for k in sorted(thinking.keys() - {"type", "display"}) if thinking[k]
    ]
    options += [f"tools: {tool['type']}" for tool in body.get("tools") or () if _hosted(tool)]
    return options + sorted(set(_unread(body)))


def _unread(body: Body) -> Iterator[str]:
    """Yield fields inside of tools, blocks and options that have no effect."""
    parts = [
        ("tools", READ["tools"], tool) for tool in body.get("tools") or () if not _hosted(tool)
    ]
    parts += [(n, READ[n], body[n]) for n in ("output_config", "tool_choice") if body.get(n)]
    if isinstance(system := body.get("system"), list):
        parts += [("system.text", READ["text"], block) for block in system]
    for message in body["messages"]:
        kind = "messages.system" if message["role"] == "system" else "messages"
        parts.append(("messages", READ[kind], message))
        if kind == "messages.system" and (config := message.get("output_config")):
            parts.append(("messages.output_config", READ["messages.output_config"], config))
        parts += _blocks(message.get("content"), "messages")
    for where, read, part in parts:
        yield from (f"{where}.{name}" for name in part.keys() - read if part[name])


def _blocks(content: Json, where: str) -> Iterator[tuple[str, set[str], Body]]:
    """Yield the blocks of a content and nested blocks, each with the fields that are used."""
    for block in content if isinstance(content, list) else ():
        kind = block["type"]
        yield f"{where}.{kind}", READ[kind], block
        yield from _blocks(block.get("content"), f"{where}.{kind}")


def _hosted(tool: Body) -> bool:
    return str(tool.get("type")).startswith(HOSTED)


def _tool(tool: Body, index: int) -> Body:
    if tool.get("type") not in (None, "custom"):
        reason = f"{tool['type']!r:.80} is not possible behind this gateway; only custom tools are"
        raise UntranslatableError(f"tools[{index}].type", reason)
    function: Body = {k: tool[k] for k in ("name", "description", "strict") if k in tool}
    function["parameters"] = tool.get("input_schema")
    return {"type": "function", "function": function}


def _tool_choice(choice: Body) -> Body:
    if not choice:
        return {}
    kind = choice.get("type")
    chat: Body = {"parallel_tool_calls": False} if choice.get("disable_parallel_tool_use") else {}
    if kind == "tool":
        function = {"name": choice.get("name")}
        return chat | {"tool_choice": {"type": "function", "function": function}}
    if kind not in CHOICES:
        raise UntranslatableError("tool_choice.type", f"{kind!r:.80} is not one of {[*CHOICES]}")
    return chat | {"tool_choice": CHOICES[kind]}


def _add(turns: common.Turns, message: Body, where: str) -> None:
    """Append the chat messages of one message."""
    role, content = base.text(message.get("role"), f"{where}.role"), message.get("content")
    where = f"{where}.content"
    if isinstance(content, str):
        turns.add(role, content)
    elif role == "system":
        turns.add(role, _text(content, where))
    elif role == "assistant":
        _add_answer(turns, base.objects(content, where), where)
    elif blocks := base.objects(content, where):
        _add_input(turns, blocks, where)
    else:
        raise UntranslatableError(where, "must not be empty; leave the message out")


def _add_input(turns: common.Turns, blocks: list[Body], where: str) -> None:
    """Append the user's text, and each tool result as a separate message."""
    content: list[Body] = []
    for index, block in enumerate(blocks):
        path = f"{where}[{index}]"
        if block.get("type") != "tool_result":
            content.append(_part(block, path))
            continue
        if content:
            turns.add("user", common.content(content))
        content = []
        turns.add_result(block.get("tool_use_id"), _output(block, f"{path}.content"), path)
    if content:
        turns.add("user", common.content(content))


def _output(block: Body, where: str) -> Json:
    """Return the content of a tool's result: a text, or parts if it has images."""
    content = block.get("content") or ""
    blocks = [] if isinstance(content, str) else base.objects(content, where)
    parts = [_part(inner, f"{where}[{index}]") for index, inner in enumerate(blocks)]
    failed = FAILED if block.get("is_error") else ""
    if any(part["type"] != "text" for part in parts):
        return [{"type": "text", "text": failed}, *parts] if failed else parts
    text = _text(content, where)
    return text if text.startswith(failed) else failed + text


def _add_answer(turns: common.Turns, blocks: list[Body], where: str) -> None:
    if not blocks:  # a policy may give an empty answer
        turns.add("assistant", "")
    for index, block in enumerate(blocks):
        path, kind = f"{where}[{index}]", block.get("type")
        if kind == "text":
            turns.add("assistant", base.text(block.get("text"), path))
        elif kind == "thinking":
            text = base.text(block.get("thinking"), path)
            turns.think(common.thought_of(text, common.unseal(block.get("signature"))))
        elif kind == "tool_use":
            turns.call(block.get("id"), block.get("name"), arguments_of(block.get("input")))
        else:
            raise UntranslatableError(path, f"a block of type {kind!r:.80} is not possible here")


def arguments_of(value: Json) -> str:
    """Return the arguments of a tool call whose input the agent sent as `value`."""
    if isinstance(value, dict) and value.keys() == {BROKEN} and isinstance(value[BROKEN], str):
        return str(value[BROKEN])
    return msgspec.json.encode({} if value is None else value).decode()


def _part(block: Body, where: str) -> Body:
    kind, source = block.get("type"), block.get("source") or {}
    if kind == "text":
        return {"type": "text", "text": base.text(block.get("text"), where)}
    if kind == "image" and source.get("type") == "url":
        return common.image(source.get("url"))
    if kind == "image" and source.get("type") == "base64":
        return common.image(f"data:{source.get('media_type')};base64,{source.get('data')}")
    raise UntranslatableError(where, f"a block of type {kind!r:.80} is not possible here")


def _text(content: Json, where: str) -> str:
    """Return the text of a string or of text blocks; refuse other blocks."""
    if isinstance(content, str):
        return content
    text = ""
    for index, block in enumerate(base.objects(content, where)):
        if block.get("type") != "text":
            reason = f"a block of type {block.get('type')!r:.80} is not possible here, only text"
            raise UntranslatableError(f"{where}[{index}]", reason)
        text += base.text(block.get("text"), f"{where}[{index}]")
    return text


# -- the answer ------------------------------------------------------------------------------------


class MessagesTranslation(common.ChatTranslation):
    """Sends the input of a tool call once it is complete, as Anthropic does by default: an object,
    or `{BROKEN: text}` if the text is not a JSON object."""

    def __init__(self, body: Body, memory: ConversationMemory) -> None:
        self._blocks: list[Body] = []
        self._usage = {"cache_creation_input_tokens": 0, "cache_read_input_tokens": 0}
        self._usage |= {"input_tokens": 0, "output_tokens": 0}
        message: Body = {"id": f"msg_{uuid4().hex}", "type": "message", "role": "assistant"}
        message |= {"content": self._blocks, "stop_reason": None, "stop_sequence": None}
        message["usage"] = self._usage
        super().__init__(chat_request(body, memory), message, streamed=bool(body.get("stream")))
        self.ignored = ignored(body)
        self._memory, self._body = memory, body

    def _start(self, model: str, prompt_tokens: int) -> None:
        self.answer["model"] = model
        self._usage["input_tokens"] = prompt_tokens
        self._event("message_start", message=self.answer)

    def _count(self, usage: Body) -> None:
        self._usage["input_tokens"] = usage["prompt_tokens"]
        self._usage["output_tokens"] = usage["completion_tokens"]

    def _write(self, key: str, text: str, choice: Body) -> None:
        kind = "thinking" if key == "reasoning_content" else "text"
        if self._switch(kind):
            signature = {"signature": ""} if kind == "thinking" else {}
            self._add_block({"type": kind, kind: ""} | signature)
        self._blocks[-1][kind] += text
        self._delta({"type": f"{kind}_delta", kind: text})

    def _begin_call(self, id: str, name: str) -> None:
        self._add_block({"type": "tool_use", "id": id, "name": name, "input": {}})

    def _close(self) -> None:
        block = self._blocks[-1]
        if block["type"] == "tool_use":
            block["input"] = input_of(self._arguments)
            shown = msgspec.json.encode(block["input"]).decode()
            self._delta({"type": "input_json_delta", "partial_json": shown})
        elif block["type"] == "thinking":  # without a signature, clients do not send it back
            block["signature"] = common.seal(block["thinking"])
            self._delta({"type": "signature_delta", "signature": block["signature"]})
        self._event("content_block_stop", index=len(self._blocks) - 1)

    def _end(self) -> None:
        stopped = self._stop_sequence and self._finish == "stop"
        reason = "stop_sequence" if stopped else STOPS.get(self._finish, "end_turn")
        delta = {"stop_reason": reason, "stop_sequence": self._stop_sequence}
        self.answer |= delta
        self._event("message_delta", delta=delta, usage=self._usage)
        self._event("message_stop")
        if self._body.get("thread"):
            request = _with_thread(self._body, self._memory)
            turn: Body = {"role": "assistant", "content": self._blocks}
            thread = {name: request[name] for name in KEPT if name in request}
            thread["messages"] = [*request["messages"], turn]
            self._memory.kept["threads"][self.answer["id"]] = thread

    def _add_block(self, block: Body) -> None:
        self._blocks.append(block)
        self._event("content_block_start", index=len(self._blocks) - 1, content_block=block)

    def _delta(self, delta: Body) -> None:
        self._event("content_block_delta", index=len(self._blocks) - 1, delta=delta)


def input_of(arguments: str) -> Body:
    try:
        return msgspec.json.decode(arguments or "{}", type=dict[str, Any])
    except (msgspec.DecodeError, RecursionError):
        return {BROKEN: arguments}


DIALECT = Dialect("chat/completions", error, MessagesTranslation)
