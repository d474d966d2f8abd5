"""What the calls of a conversation share: tool calls in the making, and what later calls refer to.

Servers number the tool calls of a streamed message from 0, from 1 or not at all, give every call
the same index, alternate between calls, or send the name later than the id. They are assembled as
clients do.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import msgspec

from agentrl.types import Json

Body = dict[str, Json]


@dataclass(slots=True)
class ConversationMemory:
    """State of an attempt that its later calls may refer to."""

    arguments: dict[str, str] = field(default_factory=dict)
    """Tool call id -> its arguments, byte for byte as the model wrote them."""

    kept: dict[str, dict[str, Any]] = field(default_factory=lambda: defaultdict(dict))
    """What a translated API lets later calls refer to: its kind, such as "items" -> id -> it."""

    def has_any(self, ids: Iterable[str]) -> bool:
        """Whether any of the ids is one of what is kept."""
        return any(id in kept for id in ids for kept in self.kept.values())

    def remember(self, answer: Json) -> None:
        """Store the arguments of the tool calls in an assistant message."""
        for id, function in _functions([answer]):
            self.arguments[id] = function.get("arguments") or ""

    def restore(self, messages: Json) -> bool:
        """Restore the model's own text of tool call arguments that the agent sent back as equal
        JSON; return whether any changed. Other white space would change the tokens, and the call
        would not extend the previous one."""
        changed = False
        for id, function in _functions(messages):
            written, received = self.arguments.get(id), function.get("arguments")
            if written is None or written == received or not isinstance(received, str):
                continue
            if _same_json(received, written):
                function["arguments"] = written
                changed = True
        return changed


class ToolCalls:
    """The tool calls so far, in order of appearance."""

    def __init__(self) -> None:
        self.all: list[Body] = []
        self._latest: dict[int | str, Body] = {}  # index, or id if there is no index -> its call

    def add(self, delta: Body) -> None:
        """Merge a part of a call into its call."""
        function = delta.get("function") or {}
        index, id = delta.get("index"), delta.get("id")
        index = None if index == -1 else index
        if (call := self._find(index, id, function)) is None:
            call = {"type": "function", "function": {"name": "", "arguments": ""}}
            self.all.append(call)
        if (key := id if index is None else index) is not None:
            self._latest[key] = call
        first = {k: v for k, v in delta.items() if k not in ("index", "function") and v}
        call |= first | ({"id": call["id"]} if call.get("id") else {})
        for key, more in function.items():
            known = call["function"].get(key, "")
            if more and not (key == "name" and more == known):  # some repeat it in every part
                text = more if isinstance(more, str) else msgspec.json.encode(more).decode()
                call["function"][key] = known + text

    def _find(self, index: int | str | None, id: str | None, function: Body) -> Body | None:
        """Return the call that a part continues; None for a new one."""
        if index is None and id in self._latest:
            return self._latest[id]
        last = self.all[-1] if self.all else None
        call = last if index is None else self._latest.get(index)
        if call is None or (id and id == call.get("id")):
            return call
        begun, other = call["function"], id and call.get("id")
        named = function.get("name") and (begun["name"] or other)
        if named and (index is None or other):
            return None
        # A few servers vary the id within a call, so an id alone begins none.
        begins = named or (other and function.get("arguments"))
        return None if begins and is_complete(begun["arguments"]) else call


def is_complete(arguments: str) -> bool:
    """Whether arguments are a JSON object, which only white space can follow."""
    if not arguments.rstrip().endswith("}"):
        return False
    try:
        msgspec.json.decode(arguments, type=dict[str, msgspec.Raw])
    except (msgspec.DecodeError, RecursionError):
        return False
    return True


def _functions(messages: Json) -> Iterator[tuple[str, Body]]:
    """Yield id and function of each tool call in chat messages."""
    for message in messages if isinstance(messages, list) else ():
        calls = message.get("tool_calls") if isinstance(message, dict) else None
        for call in calls if isinstance(calls, list) else ():
            if isinstance(call, dict) and isinstance(function := call.get("function"), dict):
                yield str(call.get("id")), function


def _same_json(one: str, other: str) -> bool:
    try:  # also for half surrogates and 1e400, which msgspec refuses
        return bool(json.loads(one or "{}") == json.loads(other or "{}"))
    except (ValueError, RecursionError):
        return False
