"""Google's generateContent on top of chat completions, whole or as server-sent events.

Text, images, thoughts, function calls and their responses, and structured output are translated.
Tools that run on Google's servers are dropped; files and several candidates are refused.
Source: https://ai.google.dev/api/generate-content
"""

from __future__ import annotations

from functools import partial
from uuid import uuid4

import msgspec

from agentrl.runners.dialects import base
from agentrl.runners.dialects.base import Dialect, UntranslatableError
from agentrl.runners.dialects.conversation import Body, ConversationMemory
from agentrl.runners.translation import common
from agentrl.runners.translation.messages import input_of, written_arguments
from agentrl.types import Json

# Field -> values that are ignored. Other values and unknown fields are refused.
ALLOWED: dict[str, tuple[Json, ...]] = {
    "cachedContent": (None, ""),
    "candidateCount": (None, 1),
    "responseModalities": (None, [], ["TEXT"]),
    "responseMimeType": (None, "", "application/json", "text/plain"),
}
# Server options, dropped. A thinking budget has no effect on the policy.
IDLE = {"labels", "safetySettings", "serviceTier", "store", "thinkingBudget", "includeThoughts"}
# Tools that run on Google's servers, dropped.
HOSTED = {"codeExecution", "fileSearch", "googleMaps", "googleSearch", "googleSearchRetrieval"}
HOSTED |= {"urlContext"}
TRANSLATED = {"contents", "generationConfig", "model", "systemInstruction", "toolConfig", "tools"}
TRANSLATED |= {"responseJsonSchema", "responseSchema", "thinkingConfig", "thinkingLevel"}
SAME = {"temperature": "temperature", "topP": "top_p", "topK": "top_k", "seed": "seed"}
SAME |= {"maxOutputTokens": "max_completion_tokens", "stopSequences": "stop"}
SAME |= {"presencePenalty": "presence_penalty", "frequencyPenalty": "frequency_penalty"}
TYPES = {"ARRAY", "BOOLEAN", "INTEGER", "NULL", "NUMBER", "OBJECT", "STRING"}
MODES = {"AUTO": "auto", "VALIDATED": "auto", "ANY": "required", "NONE": "none"}
REASONS = {"length": "MAX_TOKENS", "content_filter": "SAFETY"}
STATUS = {400: "INVALID_ARGUMENT", 401: "UNAUTHENTICATED", 403: "PERMISSION_DENIED"}
STATUS |= {404: "NOT_FOUND", 429: "RESOURCE_EXHAUSTED", 503: "UNAVAILABLE"}
STATUS |= {504: "DEADLINE_EXCEEDED"}


def error(status: int, code: str, message: str) -> Body:
    """https://ai.google.dev/gemini-api/docs/troubleshooting"""
    kind = STATUS.get(status, "INTERNAL" if status >= 500 else "FAILED_PRECONDITION")
    return {"error": {"code": status, "message": message, "status": kind}}


# -- the request -----------------------------------------------------------------------------------


def chat_request(body: Body, memory: ConversationMemory, model: str) -> Body:
    config = body.get("generationConfig") or {}
    thinking = config.get("thinkingConfig") or {}
    for fields, where in ((body, ""), (config, "generationConfig."), (thinking, "thinkingConfig.")):
        common.refuse_unless(fields, ALLOWED, where)
        for name in fields.keys() - ALLOWED.keys() - IDLE - TRANSLATED - SAME.keys():
            raise common.impossible(f"{where}{name}", f"{fields[name]!r:.80}")
    chat: Body = {SAME[k]: v for k, v in config.items() if k in SAME and v is not None}
    system = base.joined((body.get("systemInstruction") or {}).get("parts"), "systemInstruction")
    turns = [{"role": "system", "content": system}] if system else []
    for index, content in enumerate(base.objects(body.get("contents"), "contents")):
        _add(turns, content, f"contents[{index}]", memory)
    if not turns:
        raise UntranslatableError("contents", "must not be empty", code="missing_parameter")
    chat |= {"model": model, "messages": turns}
    if thinking.get("thinkingLevel"):
        chat["reasoning_effort"] = str(thinking["thinkingLevel"]).lower()
    if schema := config.get("responseJsonSchema") or config.get("responseSchema"):
        wanted = {"name": "answer", "schema": _schema(schema), "strict": True}
        chat["response_format"] = {"type": "json_schema", "json_schema": wanted}
    elif config.get("responseMimeType") == "application/json":
        chat["response_format"] = {"type": "json_object"}
    if tools := _tools(body.get("tools")):
        chat["tools"] = tools
    calling = (body.get("toolConfig") or {}).get("functionCallingConfig") or {}
    return chat | _tool_choice(calling, bool(tools))


def prompt_of(body: Body, memory: ConversationMemory, model: str) -> Body:
    """Return the chat completion whose prompt a countTokens request counts."""
    with base.typed():
        return chat_request(body.get("generateContentRequest") or body, memory, model)


def ignored(body: Body) -> list[str]:
    """List the request's options that have no effect, and its hosted tools."""
    thinking = (body.get("generationConfig") or {}).get("thinkingConfig") or {}
    found = sorted(IDLE & (body.keys() | thinking.keys()))
    hosted = (name for tool in body.get("tools") or () for name in tool if name in HOSTED)
    return found + [f"tools: {name}" for name in hosted]


def _tools(tools: Json) -> list[Body]:
    functions = []
    for index, tool in enumerate(base.objects(tools, "tools")):
        for name in tool.keys() - HOSTED - {"functionDeclarations"}:
            raise common.impossible(f"tools[{index}]", f"{name!r:.80}")
        where = f"tools[{index}].functionDeclarations"
        for declared in base.objects(tool.get("functionDeclarations"), where):
            schema = declared.get("parametersJsonSchema") or declared.get("parameters")
            function: Body = {k: declared[k] for k in ("name", "description") if k in declared}
            function["parameters"] = _schema(schema or {"type": "object", "properties": {}})
            functions.append({"type": "function", "function": function})
    return functions


def _tool_choice(calling: Body, offered: bool) -> Body:
    mode, names = calling.get("mode"), calling.get("allowedFunctionNames") or []
    if mode not in (None, "MODE_UNSPECIFIED", *MODES) or (
        names and (mode, len(names)) != ("ANY", 1)
    ):
        what = f"mode {mode!r:.80} with {names!r:.80}"
        raise common.impossible("toolConfig.functionCallingConfig", what)
    if names:
        return {"tool_choice": {"type": "function", "function": {"name": names[0]}}}
    return {"tool_choice": MODES[mode]} if mode in MODES and offered else {}


def _schema(schema: Json) -> Json:
    """Convert Google's upper-case type names to those of JSON Schema."""
    if isinstance(schema, list):
        return [_schema(item) for item in schema]
    if not isinstance(schema, dict):
        return schema
    result = {name: _schema(inner) for name, inner in schema.items()}
    kind = result.get("type")
    return result | ({"type": kind.lower()} if isinstance(kind, str) and kind in TYPES else {})


def _add(turns: list[Body], content: Body, where: str, memory: ConversationMemory) -> None:
    """Append one content to `turns` as chat messages."""
    role, thought = content.get("role") or "user", ""
    if role not in ("user", "model", "function"):
        raise UntranslatableError(f"{where}.role", f"{role!r:.80} is not possible here")
    turn: Body = {"role": "assistant" if role == "model" else "user", "content": None}
    said: list[Body] = []
    for index, part in enumerate(base.objects(content.get("parts"), f"{where}.parts")):
        here = f"{where}.parts[{index}]"
        thought = thought or common.unseal(part.get("thoughtSignature"))
        if call := part.get("functionCall"):
            id = str(call.get("id") or f"{where}.parts[{index}]")
            arguments = written_arguments(call.get("args"), memory.arguments.get(id))
            calls = turn.setdefault("tool_calls", [])
            calls.append(common.tool_call(id, call.get("name"), arguments))
        elif answer := part.get("functionResponse"):
            output = _output(answer, f"{here}.functionResponse")
            result = {"role": "tool", "tool_call_id": answer.get("id") or _pending(turns, answer)}
            turns.append(result | {"content": output})
        elif part.get("thought"):
            text = base.text(part.get("text"), here)
            turn["reasoning_content"] = turn.get("reasoning_content", "") + text
        elif "text" in part:
            said.append({"type": "text", "text": base.text(part["text"], here)})
        elif role != "model" and (image := _image(part)):
            said.append(image)
        else:
            raise _impossible(part, here)
    if said:
        turn["content"] = common.content(said)
    if role == "model":
        hidden = {"reasoning_content": thought} if thought else {}
        turns.append(hidden | turn)
    elif turn["content"] is not None:
        turns.append(turn)


def _output(answer: Body, where: str) -> Json:
    """Return what a function has returned, with its images."""
    output, plain = answer.get("response"), False
    if isinstance(output, dict) and [*output] == ["output"]:
        output = output["output"]
        plain = isinstance(output, str)
    text = output if plain else msgspec.json.encode(output).decode()
    said: list[Body] = [{"type": "text", "text": text}]
    for index, part in enumerate(base.objects(answer.get("parts"), f"{where}.parts")):
        image = _image(part)
        if image is None:
            raise _impossible(part, f"{where}.parts[{index}]")
        said.append(image)
    return common.content(said)


def _image(part: Body) -> Body | None:
    """Return a part with an image's file as that of a chat message; None for any other."""
    data = part.get("inlineData") or {}
    kind = str(data.get("mimeType"))
    if not kind.startswith("image/"):
        return None
    file = base.text(data.get("data"), "inlineData.data")
    file = file.replace("-", "+").replace("_", "/")  # Google's SDK writes base64 for URLs
    return common.image(f"data:{kind};base64,{file}{'=' * (-len(file) % 4)}")


def _impossible(part: Body, where: str) -> UntranslatableError:
    what = f"a part with {', '.join(sorted(part)) or 'nothing'}"
    why = f"{what} is not possible here, only text, images and functions; describe it in words"
    return UntranslatableError(where, why)


def _pending(turns: list[Body], answer: Body) -> Json:
    """Return the id for a response without one: the first unanswered call with its name."""
    answered = {turn.get("tool_call_id") for turn in turns}
    calls = [call for turn in turns for call in turn.get("tool_calls") or ()]
    same = (c for c in calls if c["function"]["name"] == answer.get("name"))
    return next((c["id"] for c in same if c["id"] not in answered), None)


# -- the answer ------------------------------------------------------------------------------------


class GoogleTranslation(common.ChatTranslation):
    """Sends a function call once it is complete, as Google does. The signature of a call holds the
    thought before it, which the agent then sends back even if it does not show it."""

    def __init__(self, body: Body, memory: ConversationMemory, *, model: str, stream: bool) -> None:
        chat = chat_request(body, memory, model) | ({"stream": True} if stream else {})
        self._thought = ""
        self._parts: list[Body] = []
        self._candidate: Body = {"content": {"role": "model", "parts": self._parts}, "index": 0}
        answer: Body = {"candidates": [self._candidate], "responseId": uuid4().hex}
        super().__init__(chat, answer, streamed=stream)
        self.ignored = ignored(body)

    def _start(self, model: str, prompt_tokens: int) -> None:
        self.answer["modelVersion"] = model

    def _count(self, usage: Body) -> None:
        thought = (usage.get("completion_tokens_details") or {}).get("reasoning_tokens") or 0
        prompt, completion = usage["prompt_tokens"], usage["completion_tokens"]
        counts = {"promptTokenCount": prompt, "candidatesTokenCount": completion - thought}
        counts |= {"thoughtsTokenCount": thought, "totalTokenCount": prompt + completion}
        self.answer["usageMetadata"] = counts

    def _write(self, key: str, text: str, choice: Body) -> None:
        kind = {"thought": True} if key == "reasoning_content" else {}
        if self._switch(key):
            self._parts.append({"text": ""} | kind)
        self._parts[-1]["text"] += text
        self._thought += text if kind else ""
        self._show({"text": text} | kind)

    def _begin_call(self, id: str, name: str) -> None:
        self._parts.append({"functionCall": {"id": id, "name": name}})

    def _close(self) -> None:
        part = self._parts[-1]
        if "functionCall" in part:
            part["functionCall"]["args"] = input_of(self._arguments)
            if self._thought:
                part["thoughtSignature"] = common.seal(self._thought)
            self._thought = ""
            self._show(part)

    def _end(self) -> None:
        self._candidate["finishReason"] = REASONS.get(self._finish, "STOP")
        self._show()

    def _show(self, *parts: Body) -> None:
        shown = self._candidate | {"content": {"role": "model", "parts": parts}}
        self._events.append(base.data_event(self.answer | {"candidates": [shown]}))


def dialect(model: str, *, stream: bool) -> Dialect:
    """Return the dialect of a request whose path names `model` and its method."""
    translate = partial(GoogleTranslation, model=model, stream=stream)
    return Dialect("chat/completions", error, translate, tells_errors=True)
