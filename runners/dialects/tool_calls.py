"""Assembles the tool calls of a streamed message as clients do, however a server numbers them.

Servers count from 0, from 1 or not at all, give every call the same index, alternate between calls,
or send the name later than the id.
"""

from __future__ import annotations

from typing import Any

import msgspec

Body = dict[str, Any]


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
