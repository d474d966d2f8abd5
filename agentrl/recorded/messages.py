"""Converts messages and tools of traces of any tool to the format of chat completions.

It reads chat completions themselves, LangChain's serialisations (constructors, dictionaries of
`type` and `data`, plain fields), Anthropic's blocks, items of the Responses API and the parts of
OpenTelemetry's semantic conventions. If the arguments of a tool call are text, they stay unchanged;
if they are an object, they become JSON with Python's spaces, as most models write it.
"""

from __future__ import annotations

from typing import Any

from agentrl.recorded.nodes import Object, first, json_text, obj, parsed, rows, text_of

ROLES = {
    "human": "user",
    "ai": "assistant",
    "model": "assistant",
    "gpt": "assistant",
    "function": "tool",
    "AIMessageChunk": "assistant",
    "HumanMessageChunk": "user",
    "developer": "system",
    "tool_result": "tool",
    "agent": "assistant",
}
KNOWN = ("system", "user", "assistant", "tool")
TEXTS = ("text", "input_text", "output_text", "refusal")


def messages_of(given: Any) -> list[Object]:
    """The messages of a list, a text, or an object that has them."""
    given = parsed(given)
    if isinstance(given, dict):
        inner = first(given, "messages", "input", "contents")
        if inner is not None and not ("role" in given or "type" in given):
            system = given.get("system")
            return [
                *([] if system is None else [message_of(system, "system")]),
                *messages_of(inner),
            ]
        given = [given]
    if isinstance(given, str):
        return [{"role": "user", "content": given}] if given else []
    found: list[Object] = []
    for one in rows(given):
        one = parsed(one)
        if isinstance(one, list) and one and isinstance(one[0], str):  # ("user", "text")
            one = {"role": one[0], "content": one[1] if len(one) > 1 else ""}
        for message in messages_of(one) if isinstance(one, list) else expanded(one):
            add(found, message)
    return found


def add(found: list[Object], message: Object) -> None:
    """Append a message. Neighbouring items of one answer become one message."""
    last = found[-1] if found else {}
    item = message.pop("item", False)
    if item and last.get("role") == "assistant" == message["role"]:
        merge(last, message)
    else:
        found.append(message)


def merge(last: Object, message: Object) -> None:
    """Add a later part of an answer to its message: texts are joined, tool calls appended."""
    for key in ("content", "reasoning_content"):
        both = [one[key] for one in (last, message) if one.get(key)]
        if both and all(isinstance(text, str) for text in both):
            last[key] = "".join(both)
        else:
            last[key] = both[-1] if both else None
    if last.get("reasoning_content") is None:
        last.pop("reasoning_content", None)
    if calls := [*last.get("tool_calls", []), *message.get("tool_calls", [])]:
        last["tool_calls"] = calls


def expanded(given: Any) -> list[Object]:
    """The messages of one entry: each tool result in a user message becomes a separate message."""
    entry = obj(given)
    if not entry:
        return [{"role": "user", "content": given}] if isinstance(given, str) and given else []
    parts = first(entry, "content", "parts")
    if "type" in entry and "role" not in entry and entry["type"] in ITEMS:
        return [_item(entry)]
    results = (
        [p for p in parts if isinstance(p, dict) and p.get("type") in RESULTS]
        if isinstance(parts, list)
        else []
    )
    if not results:
        return [message_of(entry)]
    rest = [part for part in parts if part not in results] if isinstance(parts, list) else []
    found = [_result(part) for part in results]
    if rest:
        found.append(message_of({**entry, "content": rest, "parts": None}))
    return found


RESULTS = ("tool_result", "tool_call_response", "functionResponse")
ITEMS = (
    "function_call",
    "custom_tool_call",
    "local_shell_call",
    "function_call_output",
    "custom_tool_call_output",
    "reasoning",
)


def _result(part: Object) -> Object:
    output = first(part, "content", "response", "result")
    id = first(part, "tool_use_id", "id", "tool_call_id")
    return {"role": "tool", "tool_call_id": str(id or ""), "content": content_text(output)}


def _item(item: Object) -> Object:
    """An item of the Responses API."""
    kind = item["type"]
    if kind == "reasoning":
        parts = [*rows(item.get("summary")), *rows(item.get("content"))]
        thought = "".join(text_of(obj(part).get("text")) for part in parts)
        return {"role": "assistant", "content": None, "reasoning_content": thought, "item": True}
    if kind.endswith("_output"):
        output = content_text(item.get("output"))
        return {"role": "tool", "tool_call_id": str(item.get("call_id") or ""), "content": output}
    arguments = first(item, "arguments", "action")
    if kind == "custom_tool_call":
        arguments = {"input": item.get("input")}
    call = tool_call(item.get("call_id") or item.get("id"), item.get("name") or kind, arguments)
    return {"role": "assistant", "content": None, "tool_calls": [call], "item": True}


def message_of(given: Any, role: str = "") -> Object:
    """One message. role: used if the message has none."""
    given = parsed(given)
    if not isinstance(given, dict):
        return {"role": role or "user", "content": text_of(given)}
    if given.get("type") == "constructor" or "lc" in given:
        kind = str((given.get("id") or [""])[-1]).removesuffix("Chunk").removesuffix("Message")
        inner = obj(given.get("kwargs"))
        return message_of({"type": kind.lower() or role} | inner, role)
    if "data" in given and "type" in given and isinstance(given["data"], dict):
        return message_of({**given["data"], "type": given["type"]}, role)
    if isinstance(given.get("message"), dict) and "role" not in given:
        return message_of(given["message"], role)
    named = str(first(given, "role", "type") or role or "user")
    if named == "message":
        named = role or "assistant"
    own = ROLES.get(named, named)
    if own not in KNOWN and named != role:
        own = role or own  # such as {"type": "text", ...}
    message: Object = {"role": own}
    content = first(given, "content", "parts", "value", "text")
    kept, thought, calls = _content(content)
    thought += text_of(first(given, "reasoning_content", "reasoning"))
    extra = obj(given.get("additional_kwargs"))
    thought = thought or text_of(extra.get("reasoning_content"))
    if thought:
        message["reasoning_content"] = thought
    message["content"] = kept
    calls += [_call(one) for one in rows(given.get("tool_calls")) or rows(extra.get("tool_calls"))]
    if isinstance(alone := given.get("function_call") or extra.get("function_call"), dict):
        calls.append(tool_call("", alone.get("name"), alone.get("arguments")))
    if calls and own == "assistant":
        message["tool_calls"] = _unique(calls)
        message["content"] = kept or None
    if own == "tool":
        message["tool_call_id"] = str(first(given, "tool_call_id", "tool_use_id", "id") or "")
        message["content"] = content_text(content)
        if isinstance(name := given.get("name"), str) and name:
            message["name"] = name
    return message


def _unique(calls: list[Object]) -> list[Object]:
    """The calls of a message without repetitions: some formats have each call twice, as a part and
    in a field."""
    found: dict[str, Object] = {}
    for number, call in enumerate(calls):
        found.setdefault(call["id"] or str(number), call)
    return [*found.values()]


def _content(content: Any) -> tuple[Any, str, list[Object]]:
    """The text of a message (or its parts, if not all are text), its reasoning, its tool calls."""
    if not isinstance(content, list):
        return ("" if content is None else text_of(content)), "", []
    kept: list[Any] = []
    thought, calls = "", list[Object]()
    for part in content:
        part = {"type": "text", "text": part} if isinstance(part, str) else obj(part)
        part = obj(part.get("message_content")) or part  # OpenInference
        kind = str(part.get("type") or ("text" if "text" in part else ""))
        if kind in TEXTS:
            kept.append(
                {"type": "text", "text": text_of(first(part, "text", "content", "refusal"))}
            )
        elif kind in ("thinking", "reasoning"):
            thought += text_of(first(part, "thinking", "reasoning", "content", "text"))
        elif kind in ("tool_use", "tool_call", "functionCall") or "functionCall" in part:
            part = obj(part.get("functionCall")) or part
            arguments = first(part, "input", "arguments", "args")
            calls.append(tool_call(part.get("id"), part.get("name"), arguments))
        elif "functionResponse" in part:
            kept.append(
                {"type": "text", "text": text_of(obj(part["functionResponse"]).get("response"))}
            )
        elif kind in ("redacted_thinking", "server_tool_use"):
            continue
        else:
            kept.append(image_of(part))
    if all(part.get("type") == "text" for part in kept):
        return "".join(part["text"] for part in kept), thought, calls
    return kept, thought, calls


def image_of(part: Object) -> Object:
    """Convert an image part to the format of chat completions; return other parts unchanged."""
    source = obj(part.get("source"))
    if part.get("type") == "image" and source.get("data"):
        url = f"data:{source.get('media_type') or 'image/png'};base64,{source['data']}"
        return {"type": "image_url", "image_url": {"url": url}}
    if part.get("type") == "input_image" and part.get("image_url"):
        return {"type": "image_url", "image_url": {"url": part["image_url"]}}
    if part.get("type") == "blob" and part.get("modality") == "image":
        url = f"data:{part.get('mime_type') or 'image/png'};base64,{part.get('content')}"
        return {"type": "image_url", "image_url": {"url": url}}
    return part


def content_text(content: Any) -> str:
    """The result of a tool as text."""
    if isinstance(content, dict) and isinstance(content.get("kwargs"), dict):  # a ToolMessage
        content = content["kwargs"].get("content")
    if isinstance(content, dict) and content.get("type") == "tool":
        content = obj(content.get("data")).get("content", content.get("content"))
    if isinstance(content, list):
        texts = [obj(part).get("text") if isinstance(part, dict) else part for part in content]
        known = [text for text in texts if isinstance(text, str)]
        if known and len(known) == len(texts):
            return "".join(known)
    return text_of(content)


def _call(given: Any) -> Object:
    call = obj(given)
    call = obj(call.get("tool_call")) or call
    function = obj(call.get("function")) or call
    arguments = first(function, "arguments", "args", "input")
    if custom := obj(call.get("custom")):  # its input is free text
        function, arguments = custom, {"input": custom.get("input")}
    return tool_call(first(call, "id", "call_id"), function.get("name"), arguments)


def tool_call(id: Any, name: Any, arguments: Any) -> Object:
    """A tool call of a message. Without arguments it has an empty object."""
    text = json_text({} if arguments is None else arguments)
    return {
        "id": str(id or ""),
        "type": "function",
        "function": {"name": str(name or ""), "arguments": text},
    }


def tools_of(given: Any) -> list[Object]:
    """Tools in the format of chat completions."""
    if isinstance(given := parsed(given), dict):
        given = [{"name": name, **obj(about)} for name, about in given.items()]
    return [tool for tool in map(tool_of, rows(given)) if tool]


def tool_of(given: Any) -> Object:
    """A tool in the format of chat completions; an empty object if it has no name."""
    tool = obj(given)
    tool = (
        obj(tool.get("tool.json_schema")) or obj(obj(tool.get("tool")).get("json_schema")) or tool
    )
    inner = obj(tool.get("function")) or tool
    if not inner.get("name"):
        return {}
    function = {"name": inner["name"]}
    if inner.get("description"):
        function["description"] = inner["description"]
    schema = first(
        inner, "parameters", "input_schema", "inputSchema", "parametersJsonSchema", "args_schema"
    )
    if (schema := parsed(schema)) is not None:
        function["parameters"] = schema
    return {"type": "function", "function": function}


def finish_of(body: Object) -> str:
    """The finish reason in an answer of a model API, unchanged; "": missing."""
    choice = obj((rows(body.get("choices")) or [{}])[0])
    details = obj(body.get("incomplete_details"))
    found = first(choice, "finish_reason") or first(body, "stop_reason") or details.get("reason")
    return str(found or "")


def answer_of(given: Any) -> Object | None:
    """The assistant message in the output of a call; None if there is none."""
    given = parsed(given)
    if isinstance(given, list):
        inner = [one for one in given if one]
        if inner and all(isinstance(one, list) for one in inner):
            return answer_of(inner[0])
        answers = [one for one in messages_of(inner) if one["role"] == "assistant"]
        for more in answers[1:]:
            merge(answers[0], more)
        return answers[0] if answers else None
    if isinstance(given, str):
        return {"role": "assistant", "content": given} if given else None
    if not isinstance(given, dict):
        return None
    if choices := rows(given.get("choices")) or rows(given.get("generations")):
        choice = choices[0][0] if isinstance(choices[0], list) and choices[0] else choices[0]
        choice = obj(choice)
        if message := obj(choice.get("message")):
            return message_of(message, "assistant")
        return answer_of(choice.get("text"))
    for name in ("output", "message", "messages", "response", "content"):
        if name in given and not ("role" in given or "lc" in given or "type" in given):
            return answer_of(given[name]) if given[name] else None
    message = message_of(given, "assistant")
    return message if message["role"] == "assistant" else None
