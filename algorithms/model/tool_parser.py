"""Parser of tool calls, in the format of the Hermes and Qwen models; subclasses read others.

<tool_call>
{"name": "query", "arguments": {"sql": "SELECT 1"}}
</tool_call>
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import ClassVar
from uuid import uuid4

import msgspec

OPEN, CLOSE = "<tool_call>", "</tool_call>"
TOOL_FORMAT = "tool_format"  # the key of a format's name in `tokenizer_config.json`
SHORT_CALL = 1024  # characters within which most calls end
MAX_LONG_FAILURES = 64  # openings of an answer with no end within so many, and no call
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


class ToolParser:
    """Splits streamed text into content and tool calls.

    A malformed call is content, including its tags, and so is everything in the reasoning that an
    answer begins with: a model may draft calls there. White space around calls is dropped, but for
    what parts content before them from content after them.

    This class reads the format of Hermes; another format is a subclass with its own `opens`,
    `marks`, `between` and `read`.
    """

    opens: ClassVar[tuple[str, ...]] = (OPEN,)  # what a call begins with
    # Of a call, which stay part of the text even if a tokenizer calls them special.
    marks: ClassVar[tuple[str, ...]] = (OPEN, CLOSE)
    between: ClassVar[str] = ""  # characters that separate calls, besides white space

    def __init__(self, *, thinking: bool = False, tools: bytes = b"null") -> None:
        """thinking: the prompt has opened the reasoning. tools: those of the request, as JSON."""
        self.tools = tools
        self._text = ""  # not yet classified
        self._new: list[str] = []  # what came since, of `_held` characters
        self._held = self._long_failures = 0
        tags = sorted(self.opens, key=len, reverse=True)
        self._opening = re.compile("|".join(map(re.escape, tags)))
        self._begun = self._thinking = thinking
        self._after_call = False
        self._said = False  # content beside the reasoning
        self._gap = ""  # white space before the newest calls
        self._wait = 0  # length at which to read on
        self.count = 0

    def push(self, text: str) -> list[str | ToolCall]:
        """Add text; returns the content and calls that are final."""
        self._new.append(text)
        self._held += len(text)
        return [] if len(self._text) + self._held < self._wait else self._take(last=False)

    def finish(self) -> list[str | ToolCall]:
        """The remaining content and calls. A call may lack its closing tag."""
        return self._take(last=True)

    def whole(self, text: str) -> tuple[str, list[ToolCall]]:
        """Content and tool calls of a whole answer."""
        found = self.push(text) + self.finish()
        content = "".join(part for part in found if isinstance(part, str))
        return content, [part for part in found if isinstance(part, ToolCall)]

    def read(self, text: str, *, last: bool) -> tuple[int, Sequence[Function]] | None:
        """Read the calls at the start of a text, which begins with one of `opens`; returns the size
        of what was read and its calls, or None if more text decides. Without a call it is content,
        at least the opening. last: there is no more text."""
        inner = text[len(OPEN) :]
        if not inner.lstrip().startswith("{"):
            return (0, ()) if last or inner.strip() else None
        end = find_tag(inner, CLOSE, last=last)
        if end is None:
            return None
        found = decode_call(inner[:end])
        return (len(OPEN) + end + len(CLOSE), [found]) if found else (0, ())

    def _take(self, *, last: bool) -> list[str | ToolCall]:
        self._text += "".join(self._new)
        self._new.clear()
        self._held = self._wait = 0
        found = self._reasoning(last)
        if (not last and not self._begun) or self._thinking:
            return found
        text, at = self._text, 0
        while opening := self._opening.search(text, at):
            start, tag = opening.start(), opening[0]
            read = self._read(text, start, last=last)
            if read is None:
                # Reading all of a long call with each token would take its square.
                self._wait = (len(text) - start) * 17 // 16
                break
            before, end = text[at:start], start + read[0]
            if read[1]:
                said = "" if self._separates(before) else before.rstrip()
                found += self._content(said)
                if not self._after_call:
                    self._gap = before[len(before.rstrip()) :]
                found += [ToolCall(id=f"call_{uuid4().hex}", function=one) for one in read[1]]
                self._after_call = True
                self.count += len(read[1])
            else:
                end = max(end, start + len(tag))
                found += self._content(text[at:end])
            at = end
        self._text = text[at:]
        if last:
            return found + self._content(self._cut(len(self._text)))
        text = text[at : opening.start()] if opening else self._text
        ends = [len(text.rstrip())] if opening else [tag_start(text, tag) for tag in self.opens]
        end = min(ends)
        return found + self._content(self._cut(0 if self._separates(text[:end]) else end))

    def _read(self, text: str, start: int, *, last: bool) -> tuple[int, Sequence[Function]] | None:
        """`read` from a place where a call may begin, in time linear in the whole answer: of as
        much text as it takes. Each opening without an end would read all that follows, so after
        `MAX_LONG_FAILURES` only short calls are looked for."""
        size = SHORT_CALL
        while start + size < len(text):
            found = self.read(text[start : start + size], last=False)
            if found is None and self._long_failures >= MAX_LONG_FAILURES:
                return 0, ()
            if found is not None:
                break
            size *= 4
        else:
            found = self.read(text[start:], last=last)
        if found is not None and not found[1]:
            self._long_failures += size > SHORT_CALL
        return found

    def _separates(self, text: str) -> bool:
        return self._after_call and text.strip() in ("", *self.between)

    def _reasoning(self, last: bool) -> list[str | ToolCall]:
        """The text of the reasoning, if the answer begins with it."""
        start = self._text.lstrip()
        if not self._begun and (start.startswith(THINK) or not THINK.startswith(start)):
            self._begun, self._thinking = True, start.startswith(THINK)
        if not self._thinking:
            return []
        thought, closed, _ = self._text.partition(THOUGHT)
        self._thinking = not closed
        end = len(self._text) if last else tag_start(self._text, THOUGHT)
        text = self._cut(len(thought) + len(THOUGHT) if closed else end)
        return [text] if text else []

    def _cut(self, end: int) -> str:
        text, self._text = self._text[:end], self._text[end:]
        return text

    def _content(self, text: str) -> list[str | ToolCall]:
        if self._after_call:
            own = text.lstrip()
            gap = self._gap or text[: len(text) - len(own)] or " "
            text = gap + own if own and self._said else own
        if not text:
            return []
        self._after_call, self._said = False, True
        return [text]


def tag_start(text: str, tag: str) -> int:
    """The position of a trailing part that may become a tag, including white space before it."""
    end = len(text)
    for size in range(min(len(tag) - 1, end), 0, -1):
        if text.endswith(tag[:size]):
            end -= size
            break
    return len(text[:end].rstrip())


def find_tag(text: str, tag: str, *, last: bool) -> int | None:
    """The first place of a tag that is in no JSON string, or the end of the text, which may have
    cut it; 0 for what is no JSON; None if more text decides."""
    at = 0
    while (end := text.find(tag, at)) >= 0:
        quote = text.find('"', at, end)
        if quote < 0:
            return end
        string = _STRING.match(text, quote)
        if string is None:
            return 0
        if not string[1].startswith('"'):
            break
        at = string.end()
    return tag_start(text, tag) if last else None


def decode_call(written: str, keys: Sequence[str] = ("arguments",)) -> Function | None:
    """A call from a JSON object with its name and, under the first of these keys that it has, its
    arguments; None if it is none."""
    try:
        call = msgspec.json.decode(written.strip(), type=dict[str, msgspec.Raw])
        name = msgspec.json.decode(call["name"], type=str)
    except (msgspec.DecodeError, RecursionError, UnicodeEncodeError, KeyError):
        return None
    arguments = next((bytes(call[key]).decode() for key in keys if key in call), "")
    return Function(name, arguments) if arguments.startswith("{") else None
