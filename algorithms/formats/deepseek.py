"""Tool calls of DeepSeek: of V3 and R1 with a kind and the arguments in a block of code, of V3.1
with neither.

<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>query
```json
{"sql": "SELECT 1"}
```<｜tool▁call▁end｜><｜tool▁calls▁end｜>
<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>tables<｜tool▁sep｜>{}<｜tool▁call▁end｜><｜tool▁calls▁end｜>
"""

from __future__ import annotations

import re
from typing import ClassVar

from agentrl.algorithms.formats.scan import Read, is_object, value_end
from agentrl.algorithms.model.tool_parser import Function, ToolParser, find_tag


def mark(words: str) -> str:
    """One of DeepSeek's tokens, with its characters that look like others."""
    return f"<\uff5c{words.replace(' ', chr(0x2581))}\uff5c>"


OPEN, CLOSE = mark("tool calls begin"), mark("tool calls end")
CALL, END, SEPARATOR = mark("tool call begin"), mark("tool call end"), mark("tool sep")


class DeepSeekV3(ToolParser):
    """A block with anything but calls in it is content."""

    opens: ClassVar[tuple[str, ...]] = (OPEN,)
    marks: ClassVar[tuple[str, ...]] = (OPEN, CLOSE, CALL, END, SEPARATOR)
    head: ClassVar = re.compile(rf"\s*{CALL}\w*{SEPARATOR}([^\n<]+)\n```json\n\s*(?=\{{)")
    tail: ClassVar[str] = f"\n```{END}"

    def read(self, text: str, *, last: bool) -> Read | None:
        size = find_tag(text[len(OPEN) :], CLOSE, last=last)
        if size is None:
            return None
        end = len(OPEN) + size
        calls = self._calls(text[len(OPEN) : end], cut=not text.startswith(CLOSE, end))
        return (end + len(CLOSE), calls) if calls else (0, ())

    def _calls(self, text: str, *, cut: bool) -> list[Function]:
        """The calls of a block; none if it has anything else. cut: its last tag may lack."""
        found, at = list[Function](), 0
        while head := self.head.match(text, at):
            end = value_end(text, head.end())
            if not end or not is_object(text[head.end() : end]):
                return []
            found.append(Function(head[1].strip(), text[head.end() : end]))
            if cut and len(text) < end + len(self.tail) and self.tail.startswith(text[end:]):
                return found
            if not text.startswith(self.tail, end):
                return []
            at = end + len(self.tail)
        return [] if text[at:].strip() else found


class DeepSeekV31(DeepSeekV3):
    """The same without kind and code."""

    head: ClassVar = re.compile(rf"\s*{CALL}([^\n<]+){SEPARATOR}\s*(?=\{{)")
    tail: ClassVar[str] = END
