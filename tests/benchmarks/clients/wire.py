"""What a request of any of the four APIs says, read without the gateway's own translation."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from agentrl.core.types import Json
from tests.benchmarks.clients.policy import Body, plain

APIS = {
    "/chat/completions": "Chat Completions",
    "/responses": "Responses",
    "/messages": "Messages",
    "enerateContent": "generateContent",
}


@dataclass(frozen=True, slots=True)
class Item:
    """A piece of a conversation: kind is system, user, thought, words, call or result."""

    kind: str
    text: str = ""  # of a call its arguments
    name: str = ""  # of a call
    id: str = ""  # of a call or result
    raw: Json = None  # of a call its arguments as sent; of words the content as sent


def api_of(path: str) -> str:
    """The API of a model call; empty for other requests."""
    route = path.partition(" ")[2].partition("?")[0]
    return next((api for end, api in APIS.items() if route.endswith(end)), "")


def items_of(api: str, body: Body) -> list[Item]:
    """The conversation of a request, in the order in which it is sent."""
    read = {
        "Chat Completions": _chat,
        "Responses": _responses,
        "Messages": _messages,
        "generateContent": _google,
    }[api]
    return [item for item in read(body) if item.text or item.kind in ("call", "result")]


def tools_of(api: str, body: Body) -> dict[str, Json]:
    """Tool name -> its description and schema, of the functions that the agent offers."""
    found: dict[str, Json] = {}
    for tool in body.get("tools") or ():
        inner = tool.get("tools") if tool.get("type") == "namespace" else None
        declared = inner or _get(tool, "functionDeclarations") or [tool.get("function") or tool]
        for one in declared:
            schema = one.get("parameters") or one.get("input_schema")
            schema = schema or _get(one, "parametersJsonSchema")
            if one.get("name") and (schema is not None or "description" in one):
                found[one["name"]] = [one.get("description") or "", schema or {}]
    return found


def _chat(body: Body) -> Iterator[Item]:
    for message in body.get("messages") or ():
        role, content = message.get("role"), message.get("content")
        if role in ("system", "developer"):
            yield Item("system", plain(content))
        elif role == "tool":
            yield Item("result", plain(content), id=str(message.get("tool_call_id")))
        elif role == "user":
            yield Item("user", plain(content))
        else:
            thought = message.get("reasoning_content") or message.get("reasoning") or ""
            blocks = content if isinstance(content, list) else []
            thought = thought or "".join(
                str(part.get("thinking") or "") for part in blocks if part.get("type") == "thinking"
            )
            yield Item("thought", plain(thought))
            yield Item("words", plain(content), name=str(message.get("name") or ""), raw=content)
            for call in message.get("tool_calls") or ():
                yield _call(call.get("id"), call["function"]["name"], call["function"]["arguments"])


def _responses(body: Body) -> Iterator[Item]:
    yield Item("system", str(body.get("instructions") or ""))
    given = body.get("input")
    for one in [{"role": "user", "content": given}] if isinstance(given, str) else given or ():
        kind = one.get("type") or "message"
        if kind == "message":
            names = {"assistant": "words", "user": "user"}
            yield Item(names.get(one["role"], "system"), plain(one.get("content")))
        elif kind == "reasoning":
            parts = one.get("content") or one.get("summary") or ()
            shown = "".join(part.get("text") or "" for part in parts)
            yield Item("thought", shown or ("(sealed)" if one.get("encrypted_content") else ""))
        elif kind == "function_call":
            yield _call(one.get("call_id"), one["name"], one.get("arguments"))
        elif kind == "function_call_output":
            yield Item("result", plain(one.get("output")), id=str(one.get("call_id")))
        elif kind == "item_reference":
            yield Item("words", "(by reference)")


def _messages(body: Body) -> Iterator[Item]:
    yield Item("system", plain(body.get("system")))
    for message in body.get("messages") or ():
        content = message["content"]
        if isinstance(content, str):
            content = [{"type": "text", "text": content}]
        for block in content:
            kind = block.get("type")
            if kind == "text":
                names = {"assistant": "words", "system": "system"}
                yield Item(names.get(message["role"], "user"), block["text"])
            elif kind in ("thinking", "redacted_thinking"):
                yield Item("thought", block.get("thinking") or "(sealed)")
            elif kind == "tool_use":
                yield _call(block.get("id"), block["name"], block.get("input"))
            elif kind == "tool_result":
                yield Item("result", plain(block.get("content")), id=str(block["tool_use_id"]))


def _google(body: Body) -> Iterator[Item]:
    system = _get(body, "systemInstruction") or {}
    yield Item("system", "".join(part.get("text") or "" for part in system.get("parts") or ()))
    for content in body.get("contents") or ():
        for part in content.get("parts") or ():
            call, response = _get(part, "functionCall"), _get(part, "functionResponse")
            sealed = _get(part, "thoughtSignature")
            if call:
                if sealed:
                    yield Item("thought", "(sealed)")
                yield _call(call.get("id"), call["name"], call.get("args"))
            elif response:
                yield Item(
                    "result", json.dumps(response.get("response")), id=str(response.get("id"))
                )
            elif part.get("thought"):
                yield Item("thought", part.get("text") or "(sealed)")
            elif content.get("role") == "model":
                if sealed:
                    yield Item("thought", "(sealed)")
                yield Item("words", part.get("text") or "")
            else:
                yield Item("user", part.get("text") or "")


def _call(id: Json, name: str, arguments: Json) -> Item:
    text = arguments if isinstance(arguments, str) else json.dumps(arguments or {})
    return Item("call", text, name, str(id or ""), arguments)


def _get(fields: Body, name: str) -> Any:
    """A field of Google's, whose JSON takes camelCase and snake_case."""
    snake = "".join(f"_{c.lower()}" if c.isupper() else c for c in name)
    return fields.get(name, fields.get(snake))
