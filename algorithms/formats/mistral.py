"""Tool calls of Mistral: after a token, a list in JSON or, of newer models, names and arguments.

[TOOL_CALLS][{"name": "query", "arguments": {"sql": "SELECT 1"}}]
[TOOL_CALLS]query[ARGS]{"sql": "SELECT 1"}[TOOL_CALLS]tables[ARGS]{}
"""

from __future__ import annotations

import re
from typing import ClassVar

from agentrl.algorithms.formats.scan import Read, is_object, read_list, value_end
from agentrl.algorithms.model.tool_parser import Function, ToolParser

TAG, ID, ARGS = "[TOOL_CALLS]", "[CALL_ID]", "[ARGS]"
NAMED = re.compile(r"\[TOOL_CALLS\]\s*([\w.-]+)(?:\[CALL_ID\]\w+)?(?:\[ARGS\])?\s*(?=\{)")
NAMED_START = re.compile(r"\[TOOL_CALLS\]\s*[\w.-]+(?:\[[A-Z_]*\]?\w*){0,2}")


class Mistral(ToolParser):
    """A list with anything else in it is content."""

    opens: ClassVar[tuple[str, ...]] = (TAG,)
    marks: ClassVar[tuple[str, ...]] = (TAG, ID, ARGS)

    def read(self, text: str, *, last: bool) -> Read | None:
        named = NAMED.match(text)
        if named is None:
            if not last and NAMED_START.fullmatch(text.rstrip()):
                return None
            return read_list(text, len(TAG), last=last)
        end = value_end(text, named.end())
        if end is None:
            return (len(text), ()) if last else None
        call = Function(named[1], text[named.end() : end])
        return end, [call] if is_object(call.arguments) else ()
