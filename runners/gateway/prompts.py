"""The texts of a candidate take the place of the agent's own, on the way to the model.

Always true: all else that a message says, such as the date, stays; messages that do not change are
sent as the bytes that came; neither the agent nor the memory of its conversation sees the change.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import msgspec

from agentrl.runners.gateway.capture import Fields, ModelRequest
from agentrl.types import Json, PromptText

SYSTEM = ("system", "developer")
Object = dict[str, Json]


class PromptNotFoundError(Exception):
    """The agent does not send the text that a candidate replaces."""


def with_prompts(request: ModelRequest, role: str, prompts: Sequence[PromptText]) -> ModelRequest:
    """The request as the model is to read it. Raises PromptNotFoundError, naming the role."""
    for prompt in prompts:
        if prompt.role == role:
            request = _with_prompt(request, prompt)
    return request


def _with_prompt(request: ModelRequest, prompt: PromptText) -> ModelRequest:
    if prompt.tool:
        if all(_function(tool).get("name") != prompt.tool for tool in request.tools):
            return request
        fields, items = _changed(request.fields, "tools", request.tools, prompt)
        return replace(request, fields=fields, tools=items)
    fields, items = _changed(request.fields, "messages", request.messages, prompt)
    return replace(request, fields=fields, messages=items)


def _changed(
    fields: Fields, key: str, items: list[Object], prompt: PromptText
) -> tuple[Fields, list[Object]]:
    """The fields and the list of that key with the text in its place."""
    sent = fields.get(key, ())
    raw = msgspec.json.decode(sent, type=list[msgspec.Raw]) if type(sent) is msgspec.Raw else sent
    if not prompt.seed and raw:
        first = {"role": "system", "content": prompt.text}
        return fields | {key: [first, *raw]}, [first, *items]
    for at, item in enumerate(items if raw else ()):
        new = _tool(item, prompt) if prompt.tool else _message(item, prompt)
        if new is not None:
            both = ([*many[:at], new, *many[at + 1 :]] for many in (raw, items))
            return fields | {key: next(both)}, next(both)
    where = f"description of tool {prompt.tool!r}" if prompt.tool else "system message"
    raise PromptNotFoundError(
        f"role {prompt.role!r}: no {where} of this call has the text of prompts.components."
        f"{prompt.component}, {prompt.seed[:60]!r}; give the text as the agent sends it"
    )


def _message(message: Object, prompt: PromptText) -> Object | None:
    """The message with the candidate's text; None where it is another one."""
    content = message.get("content")
    if message.get("role") not in SYSTEM:
        return None
    if isinstance(content, str):
        said = _said(content, prompt)
        return None if said is None else message | {"content": said}
    parts: list[Json] = content if isinstance(content, list) else []
    for index, part in enumerate(parts):
        text = part.get("text") if isinstance(part, dict) else None
        if isinstance(text, str) and (said := _said(text, prompt)) is not None:
            new = [*parts[:index], part | {"text": said}, *parts[index + 1 :]]
            return message | {"content": new}
    return None


def _tool(tool: Object, prompt: PromptText) -> Object | None:
    function = _function(tool)
    if function.get("name") != prompt.tool:
        return None
    said = _said(str(function.get("description", "")), prompt)
    return None if said is None else tool | {"function": function | {"description": said}}


def _function(tool: Object) -> Object:
    found = tool.get("function")
    return found if isinstance(found, dict) else {}


def _said(text: str, prompt: PromptText) -> str | None:
    return text.replace(prompt.seed, prompt.text, 1) if prompt.seed in text else None
