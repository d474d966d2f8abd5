"""Parser of tool calls in the format of the Hermes and Qwen models.

<tool_call>
{"name": "query", "arguments": {"sql": "SELECT 1"}}
</tool_call>
"""

from __future__ import annotations

from uuid import uuid4

import msgspec

OPEN, CLOSE = "<tool_call>", "</tool_call>"


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

    A malformed call is content, including its tags. White space around a call is dropped.
    """

    def __init__(self) -> None:
        self._text = ""  # not yet classified
        self._after_call = False
        self.count = 0

    def push(self, text: str) -> list[str | ToolCall]:
        """Add text; returns the content and calls that are final."""
        self._text += text
        found: list[str | ToolCall] = []
        while OPEN in self._text:
            before, inner = self._text.split(OPEN, 1)
            if CLOSE not in inner:
                break
            inner, self._text = inner.split(CLOSE, 1)
            found += self._block(before, inner, OPEN + inner + CLOSE)
        text, opened, _ = self._text.partition(OPEN)
        end = len(text.rstrip()) if opened else _possible_tag_start(text)
        found += self._content(text[:end])
        self._text = self._text[end:]
        return found

    def finish(self) -> list[str | ToolCall]:
        """The remaining content and calls. A call may lack its closing tag."""
        before, opened, inner = self._text.partition(OPEN)
        self._text = ""
        if opened:
            return self._block(before, inner, OPEN + inner)
        return self._content(before)

    def _block(self, before: str, inner: str, raw: str) -> list[str | ToolCall]:
        call = _decode(inner)
        if call is None:
            return self._content(before + raw)
        found: list[str | ToolCall] = [*self._content(before.rstrip()), call]
        self._after_call = True
        self.count += 1
        return found

    def _content(self, text: str) -> list[str | ToolCall]:
        if self._after_call:
            text = text.lstrip()
        if not text:
            return []
        self._after_call = False
        return [text]


def parse(text: str) -> tuple[str, list[ToolCall]]:
    """Content and tool calls of a whole answer."""
    parser = ToolParser()
    found = parser.push(text) + parser.finish()
    content = "".join(part for part in found if isinstance(part, str))
    return content, [part for part in found if isinstance(part, ToolCall)]


def _possible_tag_start(text: str) -> int:
    """The position of a trailing part that may become a tag, including white space before it."""
    end = len(text)
    for size in range(min(len(OPEN) - 1, end), 0, -1):
        if text.endswith(OPEN[:size]):
            end -= size
            break
    return len(text[:end].rstrip())


def _decode(inner: str) -> ToolCall | None:
    try:
        written = msgspec.json.decode(inner.strip(), type=_Written)
    except (msgspec.DecodeError, UnicodeEncodeError):
        return None
    arguments = bytes(written.arguments).decode()
    if not arguments.startswith("{"):
        return None
    function = Function(name=written.name, arguments=arguments)
    return ToolCall(id=f"call_{uuid4().hex}", function=function)
