"""Tool calls of Llama 3, which are JSON objects in the text, with semicolons or commas between
several, or a list of them.

{"name": "query", "parameters": {"sql": "SELECT 1"}}; {"name": "tables", "parameters": {}}
[{"name": "query", "parameters": {"sql": "SELECT 1"}}, {"name": "tables", "parameters": {}}]
"""

from __future__ import annotations

import re
from typing import ClassVar

from agentrl.algorithms.formats.scan import ARGUMENTS, Read, read_list, value_end
from agentrl.algorithms.model.tool_parser import ToolParser, decode_call

TAG = "<|python_tag|>"
KEYS = ("name", "type", *ARGUMENTS)
# The first key, and whether it is complete.
START = re.compile(r'\s*(\[\s*)?(\{)\s*(?:"(\w*)("?))?')


class Llama3Json(ToolParser):
    """Calls may follow a tag, and be anywhere in the content."""

    opens: ClassVar[tuple[str, ...]] = (TAG, "{", "[")
    marks: ClassVar[tuple[str, ...]] = (TAG,)
    between: ClassVar[str] = ";,"

    def read(self, text: str, *, last: bool) -> Read | None:
        tag = len(TAG) if text.startswith(TAG) else 0
        start = START.match(text, tag)
        if start is None:
            begun = text[tag:].lstrip().removeprefix("[").strip()
            return (0, ()) if last or begun else None
        key, complete = start[3], bool(start[4])
        if key is None and start.end() < len(text):
            return 0, ()
        if key is not None and not any(
            name == key or (name.startswith(key) and not complete) for name in KEYS
        ):
            return 0, ()
        if start[1]:
            return read_list(text, tag, last=last)
        end = value_end(text, start.start(2))
        if end is None:
            return (len(text), ()) if last else None
        call = decode_call(text[start.start(2) : end], ARGUMENTS)
        return end, [call] if call else ()
