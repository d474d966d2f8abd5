"""Replaces the agent's prompt texts by those of a candidate, in requests to the model.

Invariant: the rest of a message, such as the date, is kept; unchanged messages are sent as the
received bytes; neither the agent nor the memory of its conversation sees the change.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import AnyStr

import msgspec

from agentrl.runners.gateway.attribution import ActiveAttempt, ReceivedCall
from agentrl.runners.gateway.features import Feature
from agentrl.runners.gateway.refusals import RefusedError
from agentrl.runners.gateway.request import ModelRequest
from agentrl.types import Json, PromptText

SYSTEM = ("system", "developer")
LARGEST_OFFSET = 512  # maximum offset of the text, in bytes, for replacing it without parsing
SEARCHED_START = 64  # characters of a text to search for first
Object = dict[str, Json]


class PromptNotFoundError(Exception):
    """The agent's request lacks the text that a candidate replaces."""


class CandidatePrompts(Feature):
    """The feature: attempts of a candidate get its texts."""

    def join(self, active: ActiveAttempt) -> None:
        if prompts := active.attempt.prompts:
            active.roles = {*active.roles, *(prompt.role for prompt in prompts)}
            active.changes.append(_with_prompts)


def _with_prompts(call: ReceivedCall) -> ReceivedCall:
    try:
        apply_prompts(call.request, call.role, call.active.attempt.prompts)
    except PromptNotFoundError as error:
        call.fail(str(error))
        raise RefusedError(400, "prompt_not_found", str(error)) from None
    return call


def apply_prompts(request: ModelRequest, role: str, prompts: Sequence[PromptText]) -> None:
    """Replace the texts of `role` in a request. Raises PromptNotFoundError, naming the role."""
    for prompt in prompts:
        if prompt.role == role:
            _apply(request, prompt)


def _apply(request: ModelRequest, prompt: PromptText) -> None:
    key, items = ("tools", request.tools) if prompt.tool else ("messages", request.messages)
    if prompt.tool and all(_function(tool).get("name") != prompt.tool for tool in items):
        return
    sent = request.fields.get(key)
    if not prompt.seed and sent:
        items.insert(0, {"role": "system", "content": prompt.text})
        request.fields[key] = [items[0], *_list(sent)]
        return
    for at, item in enumerate(items if sent else ()):
        new = _tool(item, prompt) if prompt.tool else _message(item, prompt)
        if new is not None:
            items[at] = new
            changed = _spliced(sent, prompt) if at == 0 else None
            if changed is None:
                changed = _list(sent)
                changed[at] = new
            request.fields[key] = changed
            return
    where = f"description of tool {prompt.tool!r}" if prompt.tool else "system message"
    raise PromptNotFoundError(
        f"role {prompt.role!r}: no {where} of this call has the text of prompts.components."
        f"{prompt.component}, {prompt.seed[:60]!r}; give the text as the agent sends it"
    )


def _spliced(sent: Json, prompt: PromptText) -> Json:
    """Replace the seed in the encoded list, if it is in the first item; None otherwise. Avoids
    parsing 40 kB again, which would take as long as reading the whole call."""
    if type(sent) is not msgspec.Raw:
        return None
    raw, old, new = memoryview(sent), _encoded(prompt.seed), _encoded(prompt.text)
    at = _find(raw[: LARGEST_OFFSET + len(old)].tobytes(), old)
    return None if at < 0 else msgspec.Raw(b"".join((raw[:at], new, raw[at + len(old) :])))


@lru_cache(maxsize=256)
def _encoded(text: str) -> bytes:
    return msgspec.json.encode(text)[1:-1]


def _list(sent: Json) -> list[Json]:
    return (
        msgspec.json.decode(sent, type=list[msgspec.Raw]) if type(sent) is msgspec.Raw else [*sent]
    )


def _message(message: Object, prompt: PromptText) -> Object | None:
    """Return the message with the candidate's text; None if it does not contain the seed."""
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
    at = _find(text, prompt.seed)
    return None if at < 0 else text[:at] + prompt.text + text[at + len(prompt.seed) :]


def _find(text: AnyStr, part: AnyStr) -> int:
    """Equal to `text.find(part)`, whose preprocessing is slow for a long part."""
    at = text.find(part[:SEARCHED_START])
    return at if at < 0 or text.startswith(part, at) else text.find(part)
