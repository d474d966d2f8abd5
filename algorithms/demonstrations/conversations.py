"""The conversations of a rollout, from its calls: what `[warmup] data` reads."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import suppress
from typing import Any

import msgspec

from agentrl.types import Json, Transition

Message = dict[str, Json]


def conversations_of(calls: Iterable[Transition]) -> list[dict[str, Any]]:
    """Each conversation as {"messages": [...], "tools": [...], "imitate": [...]}, where the last
    are the indices of the messages that the model wrote: an agent may show others as examples.

    A call whose messages begin with an earlier conversation, as agents send them again, continues
    it; answers stay as the model gave them."""
    found: list[dict[str, Any]] = []
    for call in calls:
        if call.answer is None:
            continue
        own = next((one for one in found if _continues(call, one)), None)
        if own is None:
            own = {"messages": [], "tools": call.tools, "imitate": []}
            found.append(own)
        messages = own["messages"]
        messages += call.messages[len(messages) :]
        own["imitate"].append(len(messages))
        messages.append({key: value for key, value in call.answer.items() if value is not None})
    return found


def _continues(call: Transition, conversation: dict[str, Any]) -> bool:
    before: Sequence[Message] = conversation["messages"]
    again = call.messages[: len(before)]
    same = [*map(what_is_said, again)] == [*map(what_is_said, before)]
    return same and len(call.messages) > len(before) and call.tools == conversation["tools"]


def what_is_said(message: Message) -> tuple[Json, ...]:
    """What a message says, however a client writes it and whatever ids its calls have."""
    content: Any = message.get("content") or ""
    if isinstance(content, list):
        content = "".join(str(part.get("text", part)) for part in content)
    functions = [call.get("function") or {} for call in message.get("tool_calls") or ()]
    calls = [(one.get("name"), _parsed(one.get("arguments"))) for one in functions]
    return message.get("role"), content, calls


def _parsed(arguments: Json) -> Json:
    with suppress(msgspec.DecodeError, TypeError):
        return msgspec.json.decode(arguments)
    return arguments
