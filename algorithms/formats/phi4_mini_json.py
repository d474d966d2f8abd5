"""Tool calls of Phi-4-mini: a list in JSON after a word or in tags.

functools[{"name": "query", "arguments": {"sql": "SELECT 1"}}]
<|tool_call|>[{"name": "query", "arguments": {"sql": "SELECT 1"}}]<|/tool_call|>
"""

from __future__ import annotations

from typing import ClassVar

from agentrl.algorithms.formats.scan import Read, read_list
from agentrl.algorithms.model.tool_parser import ToolParser

WORD, OPEN, CLOSE = "functools", "<|tool_call|>", "<|/tool_call|>"


class Phi4MiniJson(ToolParser):
    """A list with anything else in it is content."""

    opens: ClassVar[tuple[str, ...]] = (WORD, OPEN)
    marks: ClassVar[tuple[str, ...]] = (OPEN, CLOSE)

    def read(self, text: str, *, last: bool) -> Read | None:
        tagged = text.startswith(OPEN)
        found = read_list(text, len(OPEN if tagged else WORD), last=last)
        if found is None or not found[1] or not tagged:
            return found
        end, calls = found
        rest = text[end:].lstrip()
        if rest.startswith(CLOSE):
            return text.index(CLOSE, end) + len(CLOSE), calls
        if CLOSE.startswith(rest):  # the tag may follow, or the end has cut it
            return (len(text), calls) if last else None
        return found
