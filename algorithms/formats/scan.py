"""Where values end in text that a model writes, and the lists of calls in it."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence

import msgspec

from agentrl.algorithms.model.tool_parser import Function, decode_call
from agentrl.types import Json

Read = tuple[int, Sequence[Function]]  # as `ToolParser.read` returns it
PAIRS = {")": "(", "]": "[", "}": "{"}
ARGUMENTS = ("arguments", "parameters")
# Brackets and strings. Of a string, the group is its closing quote, or empty if more text could
# still close it; a quote that begins no string has no group.
JSON = re.compile(r'"(?:[^"\\\x00-\x1f]|\\.)*+("|\\?\Z)|["\[\]{}]')
PYTHON = re.compile(
    r"'(?:[^'\\\n]|\\.)*+('|\\?\Z)|\"(?:[^\"\\\n]|\\.)*+(\"|\\?\Z)|['\"()\[\]{}]", re.DOTALL
)


def value_end(text: str, start: int, tokens: re.Pattern[str] = JSON) -> int | None:
    """The end of a value that begins with the bracket at `start`; 0 if it cannot be one, None if
    more text decides."""
    open_brackets: list[str] = []
    for token in tokens.finditer(text, start):
        mark = token[0][0]
        if mark in "'\"":
            if not (closing := token[token.lastindex or 0] if token.lastindex else None):
                return 0 if closing is None else None
            if closing == "\\":
                return None
        elif mark in PAIRS:
            if open_brackets.pop() != PAIRS[mark]:
                return 0
            if not open_brackets:
                return token.end()
        else:
            open_brackets.append(mark)
    return None


def is_object(text: str) -> bool:
    """Whether a text is an object in JSON."""
    try:
        return isinstance(msgspec.json.decode(text), dict)
    except (msgspec.DecodeError, RecursionError, UnicodeEncodeError):
        return False


def json_value(text: str) -> Json:
    """Raises ValueError or RecursionError for what is no JSON, also for NaN and infinities."""

    def refuse(name: str) -> Json:
        raise ValueError(f"{name} is no JSON")

    value: Json = json.loads(text, parse_constant=refuse)
    return value


def read_list(text: str, start: int, *, last: bool) -> Read | None:
    """Read a JSON list of calls, as `ToolParser.read`; start: where it may begin."""
    start += len(text[start:]) - len(text[start:].lstrip())
    if not text.startswith("[", start):
        return (0, ()) if last or start < len(text) else None
    end = value_end(text, start)
    if end is None:
        return (len(text), ()) if last else None
    try:
        written = msgspec.json.decode(text[start:end], type=list[msgspec.Raw])
    except (msgspec.DecodeError, RecursionError, UnicodeEncodeError):
        return 0, ()
    calls = [decode_call(bytes(one).decode(), ARGUMENTS) for one in written]
    return end, [call for call in calls if call] if all(calls) else ()
