"""Tool calls as a list of calls in Python, of Llama 3.2 and 4, Gemma and others.

[query(sql="SELECT 1"), tables()]
"""

from __future__ import annotations

import ast
import json
import re
import warnings
from typing import ClassVar

from agentrl.algorithms.formats.scan import PYTHON, Read, json_value, value_end
from agentrl.algorithms.model.tool_parser import Function, ToolParser
from agentrl.types import Json

START = re.compile(r"\[\s*[^\W\d][\w.-]*\s*\(")
MAYBE_START = re.compile(r"\[\s*(?:[^\W\d][\w.-]*\s*)?")
CALL = re.compile(r"\s*([^\W\d][\w.-]*)\s*(?=\()")
# Python's own words may name an argument here, such as "from".
ARGUMENT = re.compile(r"\s*([^\W\d][\w-]*)\s*=(?!=)(.*)", re.DOTALL)
NEXT = re.compile(r"\s*(,\s*|\Z)")


class Pythonic(ToolParser):
    """Arguments are literals with names; a list with anything else in it is content."""

    opens: ClassVar[tuple[str, ...]] = ("[",)
    marks: ClassVar[tuple[str, ...]] = ()

    def read(self, text: str, *, last: bool) -> Read | None:
        if not START.match(text):
            return None if not last and MAYBE_START.fullmatch(text) else (0, ())
        end = value_end(text, 0, PYTHON)
        if end is None:
            return (len(text), ()) if last else None
        try:
            return end, _calls(text[1 : end - 1]) if end else ()
        except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError):
            return end, ()


def _calls(text: str) -> list[Function]:
    """Raises ValueError, or what literals raise, for anything but calls."""
    found, at = list[Function](), 0
    while at < len(text):
        call = CALL.match(text, at)
        end = call and value_end(text, call.end(), PYTHON)
        if not call or not end or not (following := NEXT.match(text, end)):
            raise ValueError("not a list of calls")
        arguments = json.dumps(
            _arguments(text[call.end() + 1 : end - 1]), ensure_ascii=False, allow_nan=False
        )
        arguments.encode()  # half of a surrogate pair is no text
        found.append(Function(call[1], arguments))
        at = following.end()
    return found


def _arguments(text: str) -> dict[str, Json]:
    arguments: dict[str, Json] = {}
    for part in _split(text):
        argument = ARGUMENT.fullmatch(part)
        if argument is None:
            raise ValueError("an argument without a name")
        arguments[argument[1]] = _literal(argument[2].strip())
    return arguments


def _split(text: str) -> list[str]:
    """The parts between commas that are in no bracket or string."""
    parts, start, at = list[str](), 0, 0
    token = re.compile(f"{PYTHON.pattern}|,", re.DOTALL)
    while found := token.search(text, at):
        at = found.end()
        if found[0] == ",":
            parts.append(text[start : found.start()])
            start = at
        elif found[0] in ("(", "[", "{"):
            at = value_end(text, found.start(), PYTHON) or len(text)
    return [*parts, text[start:]] if text[start:].strip() else parts


def _literal(text: str) -> Json:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # escapes that Python does not know
            value: Json = ast.literal_eval(text)
    except (ValueError, SyntaxError):
        return json_value(text)  # true, false and null, or values with them
    return value
