"""The conversations of a rollout's calls, as `[warmup] data` has them. Without torch."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import suppress
from typing import Any

import msgspec

from agentrl.core.types import Json, Transition

Message = dict[str, Json]
UNFINISHED = (
    "length",
    "max_tokens",
    "max_output_tokens",
    "model_context_window_exceeded",
    "content_filter",
    "model_length",
    "safety",
    "recitation",
    "malformed_function_call",
    "cut",
)
"""Why answers ended that are not to be imitated, as agentrl and the APIs of models name it."""


def conversations_of(calls: Iterable[Transition]) -> list[dict[str, Any]]:
    """Each conversation as {"messages": [...], "tools": [...], "imitate": [...]}, where "imitate"
    has the indices of the messages that the model wrote: other assistant messages may be an agent's
    examples. A call whose messages begin with an earlier conversation continues it; answers stay as
    the model wrote them."""
    return [conversation for conversation, _ in with_calls(calls)]


def with_calls(calls: Iterable[Transition]) -> list[tuple[dict[str, Any], list[Transition]]]:
    """The conversations, each with its calls."""
    conversations: list[tuple[dict[str, Any], list[Transition]]] = []
    for call in calls:
        if call.answer is None:
            continue
        conversation, its_calls = next(
            (entry for entry in conversations if _continues(call, entry[0])), ({}, [])
        )
        if not its_calls:
            conversation = {"messages": [], "tools": call.tools, "imitate": []}
            conversations.append((conversation, its_calls))
        its_calls.append(call)
        messages = conversation["messages"]
        messages += call.messages[len(messages) :]
        conversation["imitate"].append(len(messages))
        messages.append({key: value for key, value in call.answer.items() if value is not None})
    return conversations


def is_unfinished(call: Transition) -> bool:
    """Whether an answer was cut short."""
    return call.finish.lower() in UNFINISHED


def _continues(call: Transition, conversation: dict[str, Any]) -> bool:
    before: Sequence[Message] = conversation["messages"]
    again = call.messages[: len(before)]
    same = [*map(message_key, again)] == [*map(message_key, before)]
    return same and len(call.messages) > len(before) and call.tools == conversation["tools"]


def message_key(message: Message) -> tuple[Json, ...]:
    """Equal for messages that differ only in their form or in the ids of tool calls."""
    content: Any = message.get("content") or ""
    if isinstance(content, list):
        content = "".join(str(part.get("text", part)) for part in content)
    functions = [call.get("function") or {} for call in message.get("tool_calls") or ()]
    calls = [(function.get("name"), _parsed(function.get("arguments"))) for function in functions]
    return message.get("role"), content, calls


def _parsed(arguments: Json) -> Json:
    with suppress(msgspec.DecodeError, TypeError):
        return msgspec.json.decode(arguments)
    return arguments
