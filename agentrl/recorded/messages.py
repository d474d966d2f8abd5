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


def messages_of(given: Any) -> list[Object]:
    """The messages of a list, a text, or an object that has them. Tool calls without ids, and their
    results, get ids."""
    found: list[Object] = []
    for message in _messages(given):
        add(found, message)
    for message in found:
        message.pop("item", None)
    _give_ids(found)
    return found


def _messages(given: Any) -> Iterator[Object]:
    text, given = given, parsed(given)
    if isinstance(given, dict):
        inner = first(given, "messages", "input", "contents")
        if inner is not None and not ("role" in given or "type" in given):
            yield from system_of(given)
            yield from _messages(inner)
            return
        given = [given]
    if isinstance(text, str) and not all(map(_is_message, rows(given))):
        given = text
    if isinstance(given, str):
        if given:
            yield {"role": "user", "content": given}
        return
    for one in rows(given):
        one = parsed(one)
        if isinstance(one, list) and one and isinstance(one[0], str):  # ("user", "text")
            one = {"role": one[0], "content": one[1] if len(one) > 1 else ""}
        yield from _messages(one) if isinstance(one, list) else expanded(one)


def system_of(given: Object) -> list[Object]:
    """The system message in the fields of a request, if there is one."""
    fields = ("system", "instructions", "system_instruction", "systemInstruction")
    system = first(given, *fields) or first(obj(given.get("config")), *fields)
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


def add(found: list[Object], message: Object) -> None:
    """Append a message. Neighbouring items of one answer become one message."""
    last = found[-1] if found else {}
    if last.get("role") == "assistant" == message["role"] and message.get("item", last.get("item")):
        merge(last, message)
    else:
        found.append(message)


def merge(last: Object, message: Object) -> None:
    """Add a later part of an answer to its message: texts are joined, tool calls appended."""
    both = [one for one in (last.get("content"), message.get("content")) if one]
    if all(isinstance(one, str) for one in both):
        last["content"] = "".join(both) if both else None
    else:
        texts = ([{"type": "text", "text": one}] if isinstance(one, str) else one for one in both)
        last["content"] = [part for parts in texts for part in parts]
    if thought := text_of(last.get("reasoning_content")) + text_of(
        message.get("reasoning_content")
    ):
        last["reasoning_content"] = thought
    if calls := [*last.get("tool_calls", []), *message.get("tool_calls", [])]:
        last["tool_calls"] = calls


def _give_ids(found: list[Object]) -> None:
    """Give ids to tool calls that have none, and to the results that follow: of a result's tool, or
    in their order."""
    waiting: list[Object] = []
    for place, message in enumerate(found):
        if calls := message.get("tool_calls"):
            for number, call in enumerate(calls):
                call["id"] = call["id"] or f"call_{place}_{number}"
            waiting = [*calls]
        elif message["role"] == "tool" and waiting:
            id, name = message.get("tool_call_id"), message.get("name")
            own = [call for call in waiting if call["id"] == id]
            if not id:
                own = [call for call in waiting if call["function"]["name"] == name] or waiting
                message["tool_call_id"] = own[0]["id"]
            if own:
                waiting.remove(own[0])


def expanded(given: Any) -> list[Object]:
    """The messages of one entry: each tool result in a user message becomes a separate message."""
    entry = obj(given)
    if not entry:
        return [{"role": "user", "content": given}] if isinstance(given, str) and given else []
    parts = first(entry, "content", "parts")
    if "role" not in entry and _is_item(entry.get("type")):
        return [_item(entry)]
    results = [p for p in parts if _is_result(p)] if isinstance(parts, list) else []
    if not results:
        item = entry.get("type") == "message" or entry.get("role") == "thinking"
        return [message_of(entry) | ({"item": True} if item else {})]
    rest = [part for part in parts if part not in results] if isinstance(parts, list) else []
    found = [_result(part) for part in results]
    if rest:
        found.append(message_of({**entry, "content": rest, "parts": None}))
    return found


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
    """An item of the Responses API. What a server's own tool has done is kept as a part."""
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
    if not any(name in given for name in MESSAGE_FIELDS):  # data, such as {"question": "..."}
        return {"role": role or "user", "content": json_text(given)}
    named = str(first(given, "role", "type") or role or "user")
    if named == "message":
        named = role or "assistant"
    own = ROLES.get(named, named)
    if own not in KNOWN and named != role:
        own = role or (own if "role" in given else "user")  # such as {"type": "text", ...}
    if own == "user" and given.get("tool_call_id"):  # OpenInference, of Anthropic's results
        own = "tool"
    message: Object = {"role": own}
    content = first(given, *CONTENTS)
    kept, thought, parts = _content(content)
    extra = obj(given.get("additional_kwargs"))
    thought = (
        thought
        or thought_of(first(given, "reasoning_content", "reasoning", "thinking"))
        or thought_of(given.get("reasoning_details"))
        or thought_of(first(extra, "reasoning_content", "reasoning"))
    )
    if named == "thinking":
        kept, thought = "", thought or text_of(content)
    if named == "function_call" and (called := _sharegpt_calls(content)):
        kept, parts = "", called
    if thought:
        message["reasoning_content"] = thought
    if "weight" in given:
        message["weight"] = given["weight"]
    message["content"] = kept
    calls = [_call(one) for one in rows(given.get("tool_calls")) or rows(extra.get("tool_calls"))]
    known = {call["id"] for call in calls}
    invalid = map(_call, rows(given.get("invalid_tool_calls")))
    calls += [call for call in invalid if call["id"] not in known]
    # Some formats have each call twice, as a part, which has no arguments if it was streamed, and
    # in a field.
    known = {"", *(call["id"] for call in calls)} if calls else set()
    calls += [call for call in parts if call["id"] not in known]
    alone = given.get("function_call") or extra.get("function_call")
    if isinstance(alone, dict) and not calls:
        calls.append(tool_call("", alone.get("name"), alone.get("arguments")))
    if calls and own == "assistant":
        message["tool_calls"] = calls
        message["content"] = kept or None
    if own == "tool":
        message["tool_call_id"] = str(first(given, "tool_call_id", "tool_use_id", "id") or "")
        message["content"] = tool_content(content)
        if isinstance(name := given.get("name"), str) and name:
            message["name"] = name
    return message


def _sharegpt_calls(content: Any) -> list[Object]:
    """The calls of a message from `function_call`: JSON of one or several."""
    given = parsed(content)
    calls = [obj(one) for one in (given if isinstance(given, list) else [given])]
    named = all(call.get("name") for call in calls)
    return [tool_call("", call["name"], call.get("arguments")) for call in calls] if named else []


def thought_of(given: Any) -> str:
    """The text of reasoning, in any of its forms."""
    if isinstance(given, list):
        return "".join(map(thought_of, given))
    if not isinstance(given, dict):
        return text_of(given)
    lists = [given[key] for key in ("summary", "content") if isinstance(given.get(key), list)]
    return thought_of(lists) or thought_of(first(given, *THOUGHTS, "content", "text", "summary"))


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
        called = obj(first(part, *CALL_FIELDS)) or (part if kind in CALLS else {})
        if kind in THOUGHTS or part.get("thought") is True or "reasoningContent" in part:
            thought += thought_of(part)
        elif kind in TEXTS:
            kept.append(
                {"type": "text", "text": text_of(first(part, "text", "content", "refusal"))}
            )
        elif called.get("name") or called.get("toolName"):
            calls.append(_call(called))
        elif kind not in ("redacted_thinking", *CALLS):
            kept.append(image_of(part))
    if all(part.get("type") == "text" for part in kept):
        return "".join(part["text"] for part in kept), thought, calls
    return kept, thought, calls


def image_of(part: Object) -> Object:
    """Convert an image part to the format of chat completions; return other parts unchanged."""
    inner = obj(first(part, "source", "inlineData", "inline_data")) or part
    mime = first(inner, "media_type", "mime_type", "mimeType", "mediaType")
    is_image = part.get("type") in ("image", "input_image") or part.get("modality") == "image"
    if not is_image and not str(mime).startswith("image/"):
        return part
    found = first(inner, "data", "base64", "content", "image_url", "image", "url", "uri")
    url = obj(found).get("url") or found
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
    """The result of a tool as text, with `[image]` in the place of images."""
    found = tool_content(content)
    if isinstance(found, str):
        return found
    return "".join(part["text"] if part.get("type") == "text" else "[image]" for part in found)


def result_text(output: Any) -> str:
    """What a tool has returned as text; a text that is no message in JSON stays as it is."""
    given = parsed(output)
    if isinstance(output, str) and not (isinstance(given, dict) and _is_result_message(given)):
        return output
    return content_text(given)


def _is_result_message(value: Object) -> bool:
    return "tool_call_id" in value or "kwargs" in value or value.get("type") == "tool"


def langchain_fields(message: Object) -> Object:
    """The fields of a message of LangChain, in any of its forms."""
    return obj(message.get("kwargs")) or obj(message.get("data")) or message


def has_failed(output: Any) -> bool:
    """Whether what a tool has returned is a message of LangChain that says that it failed."""
    message = obj(output)
    message = langchain_fields(obj(message.get("output")) or message)
    return "tool_call_id" in message and message.get("status") == "error"


def _call(given: Any) -> Object:
    call = obj(given)
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


def tools_of(given: Any) -> list[Object]:
    """Tools in the format of chat completions."""
    if isinstance(given := parsed(given), dict):
        if isinstance(given.get("name"), str) or isinstance(given.get("function"), dict):
            given = [given]
        elif "function_tools" in given:  # Pydantic AI
            given = [*rows(given["function_tools"]), *rows(given.get("output_tools"))]
        else:
            given = [{"name": name, **obj(about)} for name, about in given.items()]
    declared = ("function_declarations", "functionDeclarations")  # Google
    found = [rows(first(obj(one), *declared)) or [one] for one in rows(given)]
    return [made for some in found for one in some if (made := tool_of(one))]


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
    found: Any = next(filter(None, (rows(body.get(name)) for name in CHOICES)), [])
    while isinstance(found, list) and found:
        found = found[0]
    return obj(found)


def finish_of(body: Object) -> str:
    """The finish reason in an answer of a model API or of LangChain, unchanged; "": missing."""
    choice = choice_of(body)
    message = langchain_fields(obj(choice.get("message"))) or body
    metadata = obj(message.get("response_metadata"))
    for one in (choice, obj(choice.get("generation_info")), metadata, body):
        if found := first(one, *REASONS) or obj(one.get("incomplete_details")).get("reason"):
            return str(found)
    return ""


def answer_of(given: Any) -> Object | None:
    """The assistant message in the output of a call; None if there is none. Data, such as
    {"city": "Paris"}, is an answer in JSON."""
    text, given = given, parsed(given)
    if given is None or given == "":
        return None
    if isinstance(given, list):
        inner = [one for one in given if one]
        if (
            inner
            and all(isinstance(one, list) for one in inner)
            and all(map(_is_message, inner[0]))
        ):
            return answer_of(inner[0])
        if inner and all(obj(one).get("type") in PARTS for one in inner):
            return message_of({"role": "assistant", "content": inner})
        if not all(isinstance(one, dict) and _is_message(one) for one in inner):
            return {"role": "assistant", "content": text_of(text)}
        answers = [one for one in messages_of(inner) if one["role"] == "assistant"]
        for more in answers[1:]:
            merge(answers[0], more)
        return answers[0] if answers else None
    if not isinstance(given, dict):
        return {"role": "assistant", "content": text_of(text)}
    if choice := choice_of(given):
        if message := obj(choice.get("message")):
            return message_of(message, "assistant")
        if isinstance(choice.get("content"), dict):  # Google
            return message_of(choice["content"], "assistant")
        return answer_of(choice.get("text"))
    if not _is_message(given):
        if [*given] == ["text"]:
            return answer_of(given["text"])
        for name in ("output", "message", "messages", "response", "content", "completion"):
            # In a text of JSON a text is the model's own.
            if name in given and not (isinstance(text, str) and isinstance(given[name], str)):
                return answer_of(given[name])
        if isinstance(text, str) or not any(name in given for name in ANSWERS):
            return {"role": "assistant", "content": text_of(text)}
    message = message_of(given, "assistant")
    return message if message["role"] == "assistant" else None


ANSWERS = ("parts", "function_call", *THOUGHTS)  # fields of an answer that names no role
