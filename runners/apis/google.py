"""Google's generateContent on top of chat completions, whole or as server-sent events.

Text, images, thoughts, function calls and their responses, and structured output are translated.
Tools that run on Google's servers are dropped; files and several candidates are refused.
Source: https://ai.google.dev/api/generate-content
"""

from __future__ import annotations

from functools import partial
from itertools import groupby
from uuid import uuid4

import msgspec

from agentrl.core.types import Json
from agentrl.runners.apis import base, common, google_json
from agentrl.runners.apis.base import Dialect, UntranslatableError
from agentrl.runners.apis.chat import Body, ConversationMemory
from agentrl.runners.apis.google_json import SAME
from agentrl.runners.apis.messages import arguments_of, input_of

Part = tuple[str, Body]  # a part with its path in the request
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


def chat_request(body: Body, model: str) -> Body:
    """Translate a request to a chat completion. body: the result of `google_json.read`."""
    config = body.get("generationConfig") or {}
    chat: Body = {SAME[name]: value for name, value in config.items() if name in SAME}
    turns = common.Turns()
    if system := base.joined((body.get("systemInstruction") or {}).get("parts"), "system"):
        turns.add("system", system)
    contents = body.get("contents") or []
    places = [(f"contents[{i}]", content) for i, content in enumerate(contents)]
    for role, group in groupby(places, lambda place: _role(*place, alone=len(places) == 1)):
        if role == "model":  # neighbouring contents are one turn
            _add_answer(turns, [part for place in group for part in _parts(*place)])
        else:
            for place in group:
                _add_input(turns, _parts(*place), place[0])
    if not contents:
        raise UntranslatableError("contents", "must not be empty", code="missing_parameter")
    chat |= {"model": model, "messages": turns.messages}
    if level := (config.get("thinkingConfig") or {}).get("thinkingLevel"):
        chat["reasoning_effort"] = str(level).lower()
    schema = _only(config, "responseJsonSchema", "responseSchema", "generationConfig")
    if schema:
        wanted = {"name": "answer", "schema": schema, "strict": True}
        chat["response_format"] = {"type": "json_schema", "json_schema": wanted}
    elif config.get("responseMimeType") == "application/json":
        chat["response_format"] = {"type": "json_object"}
    if tools := _tools(body.get("tools") or []):
        chat["tools"] = tools
    calling = (body.get("toolConfig") or {}).get("functionCallingConfig") or {}
    return chat | _tool_choice(calling, {tool["function"]["name"] for tool in tools})


def prompt_of(body: Body, memory: ConversationMemory, model: str) -> Body:
    """Return the chat completion whose prompt a countTokens request counts."""
    with base.typed():
        read = google_json.read(body, google_json.COUNT, "", [])
        return chat_request(read.get("generateContentRequest") or read, model)


def _tools(tools: list[Body]) -> list[Body]:
    functions = []
    for index, tool in enumerate(tools):
        for i, declared in enumerate(tool.get("functionDeclarations") or ()):
            where = f"tools[{index}].functionDeclarations[{i}]"
            base.text(declared.get("name"), f"{where}.name")
            function: Body = {k: declared[k] for k in ("name", "description") if k in declared}
            schema = _only(declared, "parametersJsonSchema", "parameters", where)
            function["parameters"] = schema or {"type": "object", "properties": {}}
            functions.append({"type": "function", "function": function})
    return functions


def _only(fields: Body, name: str, other: str, where: str) -> Json:
    """Return the value of whichever of two fields is present."""
    if name in fields and other in fields:
        raise UntranslatableError(f"{where}.{name}", f"is there beside {other}; leave one out")
    return fields.get(name, fields.get(other))


def _tool_choice(calling: Body, offered: set[str]) -> Body:
    where, mode = "toolConfig.functionCallingConfig", calling.get("mode")
    names = calling.get("allowedFunctionNames") or []
    if unknown := [name for name in names if name not in offered]:
        raise UntranslatableError(where, f"{unknown!r:.80} are not among the functions offered")
    if mode == "ANY" and len(names) == 1:
        return {"tool_choice": {"type": "function", "function": {"name": names[0]}}}
    if mode not in (None, "MODE_UNSPECIFIED", *MODES) or (names and {*names} != offered):
        raise common.impossible(where, f"mode {mode!r:.80} with {names!r:.80}")
    return {"tool_choice": MODES[mode]} if mode in MODES and offered else {}


def _role(where: str, content: Body, *, alone: bool) -> str:
    """Return the role of a content; it may be missing only if there is a single content."""
    role = content.get("role") or ("user" if alone else None)
    if role not in ("user", "model", "function"):
        why = f"{role!r:.80} is not possible here; it is user or model"
        raise UntranslatableError(f"{where}.role", why)
    return str(role)


def _parts(where: str, content: Body) -> list[Part]:
    """Return a content's parts, each with its path."""
    parts = [(f"{where}.parts[{i}]", part) for i, part in enumerate(content.get("parts") or ())]
    for path, part in parts:
        kinds = google_json.CONTENT_FIELDS & part.keys()
        if len(kinds) > 1 or not (kinds or "thoughtSignature" in part):
            raise _impossible(part, path)
    return parts


def _add_answer(turns: common.Turns, parts: list[Part]) -> None:
    """Append an answer of the model. Its reasoning is in parts, in signatures or in both."""
    thoughts = [(where, part.get("text")) for where, part in parts if part.get("thought")]
    shown = "".join(base.text(text or "", where) for where, text in thoughts)
    written = "".join(common.unseal(part.get("thoughtSignature")) for _, part in parts)
    if thought := common.thought_of(shown, written):
        turns.think(thought)
    elif not parts:
        turns.add("assistant", "")
    for where, part in parts:
        if (call := part.get("functionCall")) is not None:
            turns.call(call.get("id") or where, call.get("name"), arguments_of(call.get("args")))
        elif "text" in part:
            if not part.get("thought"):
                turns.add("assistant", base.text(part["text"], where))
        elif "thoughtSignature" not in part:
            raise _impossible(part, where)


def _add_input(turns: common.Turns, parts: list[Part], where: str) -> None:
    """Append results of functions, and then the user's text."""
    if not parts:
        raise UntranslatableError(f"{where}.parts", "must not be empty; leave the content out")
    content: list[Body] = []
    for path, part in parts:
        if (answer := part.get("functionResponse")) is not None:
            path = f"{path}.functionResponse"
            output, name = _output(answer, path), str(answer.get("name") or "")
            turns.add_result(answer.get("id"), output, path, name=name)
        elif "text" in part and not part.get("thought"):
            content.append({"type": "text", "text": base.text(part["text"], path)})
        elif image := _image(part):
            content.append(image)
        else:
            raise _impossible(part, path)
    if content:
        turns.add("user", common.content(content))


def _output(answer: Body, where: str) -> Json:
    """Return the result of a function, with its images."""
    output, plain = answer.get("response"), False
    if isinstance(output, dict) and [*output] == ["output"]:
        output = output["output"]
        plain = isinstance(output, str)
    text = output if plain else msgspec.json.encode(output).decode()
    content: list[Body] = [{"type": "text", "text": text}]
    for index, part in enumerate(answer.get("parts") or ()):
        image = _image(part)
        if image is None:
            raise _impossible(part, f"{where}.parts[{index}]")
        content.append(image)
    return common.content(content)


def _image(part: Body) -> Body | None:
    """Convert a part with an image file to a part of a chat message; None for other parts."""
    data = part.get("inlineData") or {}
    kind = str(data.get("mimeType"))
    if not kind.startswith("image/"):
        return None
    file = common.padded(base.text(data.get("data"), "inlineData.data"))
    return common.image(f"data:{kind};base64,{file}")


def _impossible(part: Body, where: str) -> UntranslatableError:
    kind = (part.get("inlineData") or {}).get("mimeType")
    what = f"a part with {', '.join(sorted(part)) or 'nothing'}{f' of {kind}' if kind else ''}"
    why = f"{what} is not possible here, only text, images and functions; describe it in words"
    return UntranslatableError(where, why)


# -- the answer ------------------------------------------------------------------------------------


class GoogleTranslation(common.ChatTranslation):
    """Sends a function call once it is complete, as Google does. The signature of a call, or of the
    last part, contains the reasoning before it, so that the agent sends the reasoning back even if
    it does not show it."""

    def __init__(self, body: Body, memory: ConversationMemory, *, model: str, stream: bool) -> None:
        dropped: list[str] = []
        read = google_json.read(body, google_json.REQUEST, "", dropped)
        chat = chat_request(read, model) | ({"stream": True} if stream else {})
        self._thought = ""
        self._held: list[Body] = []  # parts that have not been sent yet
        self._parts: list[Body] = []
        self._candidate: Body = {"content": {"role": "model", "parts": self._parts}, "index": 0}
        answer: Body = {"candidates": [self._candidate], "responseId": uuid4().hex}
        super().__init__(chat, answer, streamed=stream)
        self.ignored = google_json.listed(dropped)

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
        if not self._parts:
            self._parts.append({"text": ""})
            self._show(self._parts[0])
        if self._thought and not self._parts[-1].get("thought"):
            seal = {"thoughtSignature": common.seal(self._thought)}
            self._parts[-1] |= seal
            self._held[-1] = self._held[-1] | seal
        self._send()

    def _show(self, part: Body) -> None:
        """Send the parts before this one. The last parts are sent with the end of the answer,
        because SDKs drop an answer and its question from the conversation if an event has no part.
        Adjacent calls are sent together, because some clients merge calls of two events."""
        if self._held and not all("functionCall" in held for held in (*self._held, part)):
            self._send()
        self._held.append(part)

    def _send(self) -> None:
        shown = self._candidate | {"content": {"role": "model", "parts": self._held}}
        self._events.append(base.data_event(self.answer | {"candidates": [shown]}))
        self._held = []


def dialect(model: str, *, stream: bool) -> Dialect:
    """Return the dialect of a request whose path names `model` and its method."""
    translate = partial(GoogleTranslation, model=model, stream=stream)
    return Dialect("chat/completions", error, translate, reports_errors=True)
