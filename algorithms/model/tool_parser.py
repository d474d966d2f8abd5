"""Parser of tool calls in the format of the Hermes and Qwen models.

<tool_call>
{"name": "query", "arguments": {"sql": "SELECT 1"}}
</tool_call>
"""

from __future__ import annotations

import re
from uuid import uuid4

import msgspec

OPEN, CLOSE = "<tool_call>", "</tool_call>"
THINK, THOUGHT = "<think>", "</think>"
# A JSON string; group 1 is its closing quote, empty if more text could still close it.
_STRING = re.compile(r'"(?:[^"\\\x00-\x1f]|\\.)*+("|\\?\Z)')


class Function(msgspec.Struct, frozen=True):
    name: str
    arguments: str  # JSON, as the model wrote it


class ToolCall(msgspec.Struct, frozen=True, kw_only=True):
    id: str
    type: str = "function"
    function: Function


class _Written(msgspec.Struct):
    name: str
    arguments: msgspec.Raw


class ToolParser:
    """Splits streamed text into content and tool calls.

    A malformed call is content, including its tags, and so is everything in the reasoning that an
    answer begins with: a model may draft calls there. White space around a call is dropped.
    """

    def __init__(self, *, thinking: bool = False) -> None:
        """thinking: the prompt has opened the reasoning."""
        self._text = ""  # not yet classified
        self._begun = self._thinking = thinking
        self._after_call = False
        self.count = 0

    def push(self, text: str) -> list[str | ToolCall]:
        """Add text; returns the content and calls that are final."""
        self._text += text
        return self._take(last=False)

    def finish(self) -> list[str | ToolCall]:
        """The remaining content and calls. A call may lack its closing tag."""
        return self._take(last=True)

    def _take(self, *, last: bool) -> list[str | ToolCall]:
        found = self._reasoning(last)
        if not (self._begun or last) or self._thinking:
            return found
        while OPEN in self._text:
            before, _, inner = self._text.partition(OPEN)
            end = _end(inner, last)
            if end is None:
                break
            if call := _decode(inner[:end]):
                found += [*self._content(before.rstrip()), call]
                self._text = inner[end + len(CLOSE) :]
                self._after_call = True
                self.count += 1
            else:  # the tag is content; a call may follow it
                found += self._content(before + OPEN)
                self._text = inner
        text, opened, _ = self._text.partition(OPEN)
        end = len(text.rstrip()) if opened else _possible_tag_start(text, OPEN)
        return found + self._content(self._cut(len(text) if last else end))

    def _reasoning(self, last: bool) -> list[str | ToolCall]:
        """The text of the reasoning, if the answer begins with it."""
        start = self._text.lstrip()
        if not self._begun and (start.startswith(THINK) or not THINK.startswith(start)):
            self._begun, self._thinking = True, start.startswith(THINK)
        if not self._thinking:
            return []
        thought, closed, _ = self._text.partition(THOUGHT)
        self._thinking = not closed
        end = len(self._text) if last else _possible_tag_start(self._text, THOUGHT)
        return self._content(self._cut(len(thought) + len(THOUGHT) if closed else end))

    def _cut(self, end: int) -> str:
        text, self._text = self._text[:end], self._text[end:]
        return text

    def _content(self, text: str) -> list[str | ToolCall]:
        if self._after_call:
            text = text.lstrip()
        if not text:
            return []
        self._after_call = False
        return [text]


def parse(text: str, *, thinking: bool = False) -> tuple[str, list[ToolCall]]:
    """Content and tool calls of a whole answer. thinking: as in `ToolParser`."""
    parser = ToolParser(thinking=thinking)
    found = parser.push(text) + parser.finish()
    content = "".join(part for part in found if isinstance(part, str))
    return content, [part for part in found if isinstance(part, ToolCall)]


def _possible_tag_start(text: str, tag: str) -> int:
    """The position of a trailing part that may become a tag, including white space before it."""
    end = len(text)
    for size in range(min(len(tag) - 1, end), 0, -1):
        if text.endswith(tag[:size]):
            end -= size
            break
    return len(text[:end].rstrip())


def _end(inner: str, last: bool) -> int | None:
    """The end of the JSON after an opening tag: its closing tag that is in no string, or the end
    of the text, which may have cut that tag; 0 for what is no JSON object; None if more text
    decides."""
    if not inner.lstrip().startswith("{"):
        return 0 if last or inner.strip() else None
    at = 0
    while (tag := inner.find(CLOSE, at)) >= 0:
        quote = inner.find('"', at, tag)
        if quote < 0:
            return tag
        string = _STRING.match(inner, quote)
        if string is None:
            return 0
        if not string[1].startswith('"'):
            break
        at = string.end()
    return _possible_tag_start(inner, CLOSE) if last else None


def _decode(inner: str) -> ToolCall | None:
    try:
        written = msgspec.json.decode(inner.strip(), type=_Written)
    except (msgspec.DecodeError, RecursionError, UnicodeEncodeError):
        return None
    arguments = bytes(written.arguments).decode()
    if not arguments.startswith("{"):
        return None
    function = Function(name=written.name, arguments=arguments)
    return ToolCall(id=f"call_{uuid4().hex}", function=function)
