"""Tool calls of Qwen3-Coder: XML with the values as plain text, whose types the tools define.

<tool_call>
<function=query>
<parameter=sql>
SELECT 1
</parameter>
</function>
</tool_call>
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any, ClassVar

import msgspec

from agentrl.algorithms.formats.scan import Read, json_value
from agentrl.algorithms.model.tool_parser import CLOSE, OPEN, Function, ToolParser
from agentrl.types import Json

FUNCTION = "<function="
HEAD = re.compile(rf"(?:{OPEN}\s*)?{FUNCTION}([^>\n]+)>\s*")
# A value on lines of its own ends on one, so it may have the tag in a line.
PARAMETER = re.compile(
    r"<parameter=([^>\n]+)>(?:\n(?:(.*?)\n)??|([^\n].*?)??)</parameter>(?:[^\S\n]*+\n\s*+)?"
    r"(?=<parameter=|</function>)",
    re.DOTALL,
)
TAIL = "</function>"


class Qwen3Coder(ToolParser):
    """The outer tags may lack."""

    opens: ClassVar[tuple[str, ...]] = (OPEN, FUNCTION)

    def read(self, text: str, *, last: bool) -> Read | None:
        head = HEAD.match(text)
        if head is None:
            inner = text[len(OPEN) :].lstrip() if text.startswith(OPEN) else text
            undecided = FUNCTION.startswith(inner) or (
                inner.startswith(FUNCTION) and not re.search("[>\n]", inner)
            )
            return None if undecided and not last else (0, ())
        at, written = head.end(), dict[str, str]()
        while parameter := PARAMETER.match(text, at):
            written[parameter[1]] = parameter[2] or parameter[3] or ""
            at = parameter.end()
        if not text.startswith(TAIL, at):
            return (0, ()) if last else None
        end = self._end(text, at + len(TAIL), last=last)
        if end is None:
            return None
        types = self._types(head[1])
        arguments = {name: typed(value, types.get(name)) for name, value in written.items()}
        return end, [Function(head[1], json.dumps(arguments, ensure_ascii=False))]

    @staticmethod
    def _end(text: str, end: int, *, last: bool) -> int | None:
        """The end of a call whose function ends at `end`; None if more text decides."""
        rest = text[end:].lstrip()
        if rest.startswith(CLOSE):
            return text.index(CLOSE, end) + len(CLOSE)
        if not CLOSE.startswith(rest):
            return end
        return len(text) if last else None

    def _types(self, function: str) -> dict[str, frozenset[str]]:
        """The types of the parameters of a function that the request defines."""
        for tool in msgspec.json.decode(self.tools) or ():
            defined = tool.get("function", tool)
            if isinstance(defined, dict) and defined.get("name") == function:
                schemas = (defined.get("parameters") or {}).get("properties") or {}
                return {name: frozenset(_named(schema)) for name, schema in schemas.items()}
        return {}


def _named(schema: Any) -> Iterator[str]:
    """The names of the types that a JSON schema allows."""
    if not isinstance(schema, dict):
        return
    given = schema.get("type")
    yield from [given] if isinstance(given, str) else given or ()
    for key in ("anyOf", "oneOf", "allOf"):
        for inner in schema.get(key) or ():
            yield from _named(inner)
    if not given and "enum" in schema:
        yield from {"string" if isinstance(one, str) else "any" for one in schema["enum"]}


def typed(text: str, types: frozenset[str] | None) -> Json:
    """The value of a parameter: text if it may be text and is no value of its other types. types:
    None for a parameter that no tool defines."""
    if types is None or types == {"string"}:
        return text
    word = {"True": "true", "False": "false", "None": "null"}.get(text.strip(), text)
    try:
        value = json_value(word)
    except (ValueError, RecursionError):
        return text
    return text if isinstance(value, str) and "string" in types else value
