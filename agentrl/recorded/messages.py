"""Converts messages and tools of traces of any tool to the format of chat completions.

It reads chat completions themselves, LangChain's serialisations (constructors, dictionaries of
`type` and `data`, plain fields), Anthropic's blocks, items of the Responses API and the parts of
OpenTelemetry's semantic conventions. If the arguments of a tool call are text, they stay unchanged;
if they are an object, they become JSON with Python's spaces, as most models write it.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from agentrl.recorded.nodes import Object, first, json_text, obj, parsed, rows, text_of

ROLES = {
    "human": "user",
    "prompter": "user",
    "ai": "assistant",
    "model": "assistant",
    "gpt": "assistant",
    "chatgpt": "assistant",
    "bot": "assistant",
    "function": "tool",
    "function_response": "tool",
    "observation": "tool",
    "AIMessageChunk": "assistant",
    "HumanMessageChunk": "user",
    "developer": "system",
    "tool_result": "tool",
    "agent": "assistant",
    "function_call": "assistant",
    "thinking": "assistant",
}
KNOWN = ("system", "user", "assistant", "tool")
TEXTS = ("text", "input_text", "output_text", "refusal")
THOUGHTS = ("thinking", "reasoning", "reasoning_content", "reasoningContent", "reasoningText")
IMAGES = ("image", "input_image", "image_url", "blob")
CALLS = ("tool_use", "tool_call", "tool-call", "function_call", "invalid_tool_call")
PARTS = (*TEXTS, *THOUGHTS, *IMAGES, *CALLS, "redacted_thinking", "server_tool_use")
RESULTS = ("tool_result", "tool_call_response", "tool-result")
# Fields that hold a tool call or a result in parts without a type: Google's, Bedrock's.
CALL_FIELDS = ("functionCall", "function_call", "toolUse")
RESULT_FIELDS = ("functionResponse", "function_response", "toolResult")
CONTENTS = ("content", "parts", "value", "text")  # fields with the content of a message
MESSAGE_FIELDS = (*CONTENTS, "role", "tool_calls", "function_call", "tool_call_id", *THOUGHTS)


def messages_of(value: Any) -> list[Object]:
    """The messages of a list, a text, or an object that has them. Tool calls without ids, and their
    results, get ids."""
    messages: list[Object] = []
    for message in _messages(value):
        add(messages, message)
    for message in messages:
        message.pop("item", None)
    _give_ids(messages)
    return messages


def _messages(value: Any) -> Iterator[Object]:
    text, value = value, parsed(value)
    if isinstance(value, dict):
        inner = first(value, "messages", "input", "contents")
        if inner is not None and not ("role" in value or "type" in value):
            yield from system_of(value)
            yield from _messages(inner)
            return
        value = [value]
    if isinstance(text, str) and not all(map(_is_message, rows(value))):
        value = text
    if isinstance(value, str):
        if value:
            yield {"role": "user", "content": value}
        return
    for entry in rows(value):
        entry = parsed(entry)
        if isinstance(entry, list) and entry and isinstance(entry[0], str):  # ("user", "text")
            entry = {"role": entry[0], "content": entry[1] if len(entry) > 1 else ""}
        yield from _messages(entry) if isinstance(entry, list) else expanded(entry)


def system_of(request: Object) -> list[Object]:
    """The system message in the fields of a request, if there is one."""
    fields = ("system", "instructions", "system_instruction", "systemInstruction")
    system = first(request, *fields) or first(obj(request.get("config")), *fields)
    return [message_of({"role": "system", **_content_field(system)})] if system else []


def _content_field(system: Any) -> Object:
    system = parsed(system)
    return system if isinstance(system, dict) else {"content": system}


def _is_message(value: Any) -> bool:
    """Whether a value of JSON is a message, rather than data."""
    return isinstance(value, list | dict) and (
        isinstance(value, list)
        or "role" in value
        or "lc" in value
        or bool(value.get("tool_calls"))
        or isinstance(value.get("message"), dict)
        or value.get("type") in (*ROLES, *KNOWN, "message", "constructor")
        or _is_item(value.get("type"))
    )


def add(messages: list[Object], message: Object) -> None:
    """Append a message. Neighbouring items of one answer become one message."""
    last = messages[-1] if messages else {}
    if last.get("role") == "assistant" == message["role"] and message.get("item", last.get("item")):
        merge(last, message)
    else:
        messages.append(message)


def merge(last: Object, message: Object) -> None:
    """Add a later part of an answer to its message: texts are joined, tool calls appended."""
    both = [content for content in (last.get("content"), message.get("content")) if content]
    if all(isinstance(content, str) for content in both):
        last["content"] = "".join(both) if both else None
    else:
        texts = (
            [{"type": "text", "text": content}] if isinstance(content, str) else content
            for content in both
        )
        last["content"] = [part for parts in texts for part in parts]
    if thought := text_of(last.get("reasoning_content")) + text_of(
        message.get("reasoning_content")
    ):
        last["reasoning_content"] = thought
    if calls := [*last.get("tool_calls", []), *message.get("tool_calls", [])]:
        last["tool_calls"] = calls


def _give_ids(messages: list[Object]) -> None:
    """Give ids to tool calls that have none, and to the results that follow: each gets the id of a
    call of its tool, or else of the next call."""
    waiting: list[Object] = []
    for place, message in enumerate(messages):
        if calls := message.get("tool_calls"):
            for number, call in enumerate(calls):
                call["id"] = call["id"] or f"call_{place}_{number}"
            waiting = [*calls]
        elif message["role"] == "tool" and waiting:
            id, name = message.get("tool_call_id"), message.get("name")
            matching = [call for call in waiting if call["id"] == id]
            if not id:
                matching = [call for call in waiting if call["function"]["name"] == name] or waiting
                message["tool_call_id"] = matching[0]["id"]
            if matching:
                waiting.remove(matching[0])


def expanded(value: Any) -> list[Object]:
    """The messages of one entry: each tool result in a user message becomes a separate message."""
    entry = obj(value)
    if not entry:
        return [{"role": "user", "content": value}] if isinstance(value, str) and value else []
    parts = first(entry, "content", "parts")
    if "role" not in entry and _is_item(entry.get("type")):
        return [_item(entry)]
    results = [p for p in parts if _is_result(p)] if isinstance(parts, list) else []
    if not results:
        item = entry.get("type") == "message" or entry.get("role") == "thinking"
        return [message_of(entry) | ({"item": True} if item else {})]
    other_parts = [part for part in parts if part not in results] if isinstance(parts, list) else []
    messages = [_result(part) for part in results]
    if other_parts:
        messages.append(message_of({**entry, "content": other_parts, "parts": None}))
    return messages


# Items of the Responses API, besides those that end in `_call` and `_call_output`.
ITEMS = ("reasoning", "mcp_list_tools", "tool_search_output", "compaction")
TOOL_CALLS = ("function_call", "custom_tool_call", "local_shell_call")


def _is_item(kind: Any) -> bool:
    return kind in ITEMS or str(kind).endswith(("_call", "_call_output"))


def _is_result(part: Any) -> bool:
    return isinstance(part, dict) and (
        part.get("type") in RESULTS or any(name in part for name in RESULT_FIELDS)
    )


def _result(part: Object) -> Object:
    part = obj(first(part, *RESULT_FIELDS)) or part
    output = first(part, "content", "response", "result", "output")
    if isinstance(output, dict) and {*output} == {"type", "value"}:  # of Vercel's AI SDK
        output = output["value"]
    id = first(part, "tool_use_id", "id", "tool_call_id", "toolCallId", "toolUseId")
    name = first(part, "name", "toolName")
    message = {"role": "tool", "tool_call_id": str(id or ""), "content": tool_content(output)}
    return message | ({"name": name} if isinstance(name, str) and name else {})


def _item(item: Object) -> Object:
    """An item of the Responses API. Calls of tools that the server runs are kept as parts."""
    kind = item["type"]
    message: Object = {"role": "assistant", "content": None, "item": True}
    if kind == "reasoning":
        thought = thought_of(item)
        return message | ({"reasoning_content": thought} if thought else {})
    if kind.endswith("call_output"):
        output = item.get("output")
        if obj(output).get("image_url"):  # a screenshot
            output = [{**obj(output), "type": "input_image"}]
        id = str(item.get("call_id") or "")
        return {"role": "tool", "tool_call_id": id, "content": tool_content(output)}
    if kind not in TOOL_CALLS and not item.get("call_id"):
        return message | {"content": [item]}
    arguments = first(item, "arguments", "action", "operation")
    if kind == "custom_tool_call":
        arguments = {"input": item.get("input")}
    call = tool_call(item.get("call_id") or item.get("id"), item.get("name") or kind, arguments)
    return message | {"tool_calls": [call]}


def message_of(value: Any, role: str = "") -> Object:
    """One message. role: used if the message has none."""
    value = parsed(value)
    if not isinstance(value, dict):
        return {"role": role or "user", "content": text_of(value)}
    if value.get("type") == "constructor" or "lc" in value:
        kind = str((value.get("id") or [""])[-1]).removesuffix("Chunk").removesuffix("Message")
        inner = obj(value.get("kwargs"))
        return message_of({"type": kind.lower() or role} | inner, role)
    if "data" in value and "type" in value and isinstance(value["data"], dict):
        return message_of({**value["data"], "type": value["type"]}, role)
    if isinstance(value.get("message"), dict) and "role" not in value:
        return message_of(value["message"], role)
    if not any(name in value for name in MESSAGE_FIELDS):  # data, such as {"question": "..."}
        return {"role": role or "user", "content": json_text(value)}
    named = str(first(value, "role", "type") or role or "user")
    if named == "message":
        named = role or "assistant"
    message_role = ROLES.get(named, named)
    if message_role not in KNOWN and named != role:
        message_role = role or (
            message_role if "role" in value else "user"
        )  # such as {"type": "text", ...}
    if message_role == "user" and value.get(
        "tool_call_id"
    ):  # OpenInference, of Anthropic's results
        message_role = "tool"
    message: Object = {"role": message_role}
    content = first(value, *CONTENTS)
    body, thought, parts = _content(content)
    extra = obj(value.get("additional_kwargs"))
    thought = (
        thought
        or thought_of(first(value, "reasoning_content", "reasoning", "thinking"))
        or thought_of(value.get("reasoning_details"))
        or thought_of(first(extra, "reasoning_content", "reasoning"))
    )
    if named == "thinking":
        body, thought = "", thought or text_of(content)
    if named == "function_call" and (called := _sharegpt_calls(content)):
        body, parts = "", called
    if thought:
        message["reasoning_content"] = thought
    if "weight" in value:
        message["weight"] = value["weight"]
    message["content"] = body
    calls = [_call(call) for call in rows(value.get("tool_calls")) or rows(extra.get("tool_calls"))]
    known_ids = {call["id"] for call in calls}
    invalid = map(_call, rows(value.get("invalid_tool_calls")))
    calls += [call for call in invalid if call["id"] not in known_ids]
    # Some formats have each call twice, as a part, which has no arguments if it was streamed, and
    # in a field.
    known_ids = {"", *(call["id"] for call in calls)} if calls else set()
    calls += [call for call in parts if call["id"] not in known_ids]
    function_call = value.get("function_call") or extra.get("function_call")
    if isinstance(function_call, dict) and not calls:
        calls.append(tool_call("", function_call.get("name"), function_call.get("arguments")))
    if calls and message_role == "assistant":
        message["tool_calls"] = calls
        message["content"] = body or None
    if message_role == "tool":
        message["tool_call_id"] = str(first(value, "tool_call_id", "tool_use_id", "id") or "")
        message["content"] = tool_content(content)
        if isinstance(name := value.get("name"), str) and name:
            message["name"] = name
    return message


def _sharegpt_calls(content: Any) -> list[Object]:
    """The calls of a message from `function_call`: JSON of one or several."""
    value = parsed(content)
    calls = [obj(call) for call in (value if isinstance(value, list) else [value])]
    named = all(call.get("name") for call in calls)
    return [tool_call("", call["name"], call.get("arguments")) for call in calls] if named else []


def thought_of(value: Any) -> str:
    """The text of reasoning, in any of its forms."""
    if isinstance(value, list):
        return "".join(map(thought_of, value))
    if not isinstance(value, dict):
        return text_of(value)
    lists = [value[key] for key in ("summary", "content") if isinstance(value.get(key), list)]
    return thought_of(lists) or thought_of(first(value, *THOUGHTS, "content", "text", "summary"))


def _content(content: Any) -> tuple[Any, str, list[Object]]:
    """The text of a message (or its parts, if not all are text), its reasoning, its tool calls."""
    if not isinstance(content, list):
        return ("" if content is None else text_of(content)), "", []
    shown: list[Any] = []
    thought, calls = "", list[Object]()
    for part in content:
        part = {"type": "text", "text": part} if isinstance(part, str) else obj(part)
        part = obj(part.get("message_content")) or part  # OpenInference
        kind = str(part.get("type") or ("text" if "text" in part else ""))
        called = obj(first(part, *CALL_FIELDS)) or (part if kind in CALLS else {})
        if kind in THOUGHTS or part.get("thought") is True or "reasoningContent" in part:
            thought += thought_of(part)
        elif kind in TEXTS:
            shown.append(
                {"type": "text", "text": text_of(first(part, "text", "content", "refusal"))}
            )
        elif called.get("name") or called.get("toolName"):
            calls.append(_call(called))
        elif kind not in ("redacted_thinking", *CALLS):
            shown.append(image_of(part))
    if all(part.get("type") == "text" for part in shown):
        return "".join(part["text"] for part in shown), thought, calls
    return shown, thought, calls


def image_of(part: Object) -> Object:
    """Convert an image part to the format of chat completions; return other parts unchanged."""
    inner = obj(first(part, "source", "inlineData", "inline_data")) or part
    mime = first(inner, "media_type", "mime_type", "mimeType", "mediaType")
    is_image = part.get("type") in ("image", "input_image") or part.get("modality") == "image"
    if not is_image and not str(mime).startswith("image/"):
        return part
    link = first(inner, "data", "base64", "content", "image_url", "image", "url", "uri")
    url = obj(link).get("url") or link
    if not isinstance(url, str) or not url:
        return part
    if not url.startswith(("data:", "http:", "https:")):
        url = f"data:{mime or 'image/png'};base64,{url}"
    return {"type": "image_url", "image_url": {"url": url}}


def tool_content(content: Any) -> Any:
    """The result of a tool: text, or parts if there are images."""
    if isinstance(content, dict) and isinstance(content.get("kwargs"), dict):  # a ToolMessage
        content = content["kwargs"].get("content")
    if isinstance(content, dict) and (content.get("type") == "tool" or "tool_call_id" in content):
        content = obj(content.get("data")).get("content", content.get("content"))
    if isinstance(content, list) and content and all(map(_is_shown, content)):
        return _content(content)[0]
    return text_of(content)


def _is_shown(part: Any) -> bool:
    """Whether it is a part of a message, rather than data."""
    return isinstance(part, dict) and (part.get("type") in (*TEXTS, *IMAGES) or [*part] == ["text"])


def content_text(content: Any) -> str:
    """The result of a tool as text, with `[image]` in place of images."""
    converted = tool_content(content)
    if isinstance(converted, str):
        return converted
    return "".join(part["text"] if part.get("type") == "text" else "[image]" for part in converted)


def result_text(output: Any) -> str:
    """The output of a tool as text; a text that is not a message in JSON stays unchanged."""
    decoded = parsed(output)
    if isinstance(output, str) and not (isinstance(decoded, dict) and _is_result_message(decoded)):
        return output
    return content_text(decoded)


def _is_result_message(value: Object) -> bool:
    return "tool_call_id" in value or "kwargs" in value or value.get("type") == "tool"


def langchain_fields(message: Object) -> Object:
    """The fields of a message of LangChain, in any of its forms."""
    return obj(message.get("kwargs")) or obj(message.get("data")) or message


def has_failed(output: Any) -> bool:
    """Whether the output of a tool is a message of LangChain with the status "error"."""
    message = obj(output)
    message = langchain_fields(obj(message.get("output")) or message)
    return "tool_call_id" in message and message.get("status") == "error"


def _call(value: Any) -> Object:
    call = obj(value)
    call = obj(call.get("tool_call")) or call
    function = obj(call.get("function")) or call
    streamed = function.get("partial_json") if not function.get("input") else None
    arguments = streamed or first(function, "arguments", "args", "input")
    if custom := obj(call.get("custom")):  # its input is free text
        function, arguments = custom, {"input": custom.get("input")}
    id = first(call, "call_id", "id", "toolCallId", "toolUseId")
    return tool_call(id, first(function, "name", "toolName"), arguments)


def tool_call(id: Any, name: Any, arguments: Any) -> Object:
    """A tool call of a message. Without arguments it has an empty object."""
    text = json_text({} if arguments is None else arguments)
    return {
        "id": str(id or ""),
        "type": "function",
        "function": {"name": str(name or ""), "arguments": text},
    }


def tools_of(value: Any) -> list[Object]:
    """Tools in the format of chat completions."""
    if isinstance(value := parsed(value), dict):
        if isinstance(value.get("name"), str) or isinstance(value.get("function"), dict):
            value = [value]
        elif "function_tools" in value:  # Pydantic AI
            value = [*rows(value["function_tools"]), *rows(value.get("output_tools"))]
        else:
            value = [{"name": name, **obj(about)} for name, about in value.items()]
    declared = ("function_declarations", "functionDeclarations")  # Google
    groups = [rows(first(obj(entry), *declared)) or [entry] for entry in rows(value)]
    return [tool for group in groups for entry in group if (tool := tool_of(entry))]


def tool_of(value: Any) -> Object:
    """A tool in the format of chat completions; an empty object if it has no name."""
    tool = obj(value)
    tool = (
        obj(tool.get("tool.json_schema")) or obj(obj(tool.get("tool")).get("json_schema")) or tool
    )
    inner = obj(tool.get("function")) or tool
    if not inner.get("name"):
        return {}
    function = {"name": inner["name"]}
    if inner.get("description"):
        function["description"] = inner["description"]
    if (schema := parsed(first(inner, *SCHEMAS))) is not None:
        function["parameters"] = schema
    return {"type": "function", "function": function}


SCHEMAS = (
    "parameters",
    "input_schema",
    "inputSchema",
    "parametersJsonSchema",
    "parameters_json_schema",
    "args_schema",
)


CHOICES = ("choices", "generations", "candidates")
REASONS = ("finish_reason", "finishReason", "stop_reason", "stopReason")


def choice_of(body: Object) -> Object:
    """The first of the choices in an answer of a model API or of LangChain."""
    choice: Any = next(filter(None, (rows(body.get(name)) for name in CHOICES)), [])
    while isinstance(choice, list) and choice:
        choice = choice[0]
    return obj(choice)


def finish_of(body: Object) -> str:
    """The finish reason in an answer of a model API or of LangChain, unchanged; "": missing."""
    choice = choice_of(body)
    message = langchain_fields(obj(choice.get("message"))) or body
    metadata = obj(message.get("response_metadata"))
    for fields in (choice, obj(choice.get("generation_info")), metadata, body):
        if reason := first(fields, *REASONS) or obj(fields.get("incomplete_details")).get("reason"):
            return str(reason)
    return ""


def answer_of(value: Any) -> Object | None:
    """The assistant message in the output of a call; None if there is none. Data, such as
    {"city": "Paris"}, is an answer in JSON."""
    text, value = value, parsed(value)
    if value is None or value == "":
        return None
    if isinstance(value, list):
        inner = [entry for entry in value if entry]
        if (
            inner
            and all(isinstance(entry, list) for entry in inner)
            and all(map(_is_message, inner[0]))
        ):
            return answer_of(inner[0])
        if inner and all(obj(entry).get("type") in PARTS for entry in inner):
            return message_of({"role": "assistant", "content": inner})
        if not all(isinstance(entry, dict) and _is_message(entry) for entry in inner):
            return {"role": "assistant", "content": text_of(text)}
        answers = [entry for entry in messages_of(inner) if entry["role"] == "assistant"]
        for more in answers[1:]:
            merge(answers[0], more)
        return answers[0] if answers else None
    if not isinstance(value, dict):
        return {"role": "assistant", "content": text_of(text)}
    if choice := choice_of(value):
        if message := obj(choice.get("message")):
            return message_of(message, "assistant")
        if isinstance(choice.get("content"), dict):  # Google
            return message_of(choice["content"], "assistant")
        return answer_of(choice.get("text"))
    if not _is_message(value):
        if [*value] == ["text"]:
            return answer_of(value["text"])
        for name in ("output", "message", "messages", "response", "content", "completion"):
            # If the output is JSON text, the model wrote the text in this field itself.
            if name in value and not (isinstance(text, str) and isinstance(value[name], str)):
                return answer_of(value[name])
        if isinstance(text, str) or not any(name in value for name in ANSWERS):
            return {"role": "assistant", "content": text_of(text)}
    message = message_of(value, "assistant")
    return message if message["role"] == "assistant" else None


ANSWERS = ("parts", "function_call", *THOUGHTS)  # fields of an answer that names no role
