"""Formats in which models write tool calls, by name, and a parser of each.

`ToolParser` reads the format of the Hermes and Qwen models; the other formats are subclasses.
"""

from __future__ import annotations

import ast
import json
import re
import warnings
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar
from uuid import uuid4

import msgspec

from agentrl.core.errors import ConfigError, nearest
from agentrl.core.loading import load_attribute
from agentrl.core.types import Json

if TYPE_CHECKING:
    from agentrl.algorithms.model.chat import Tokenizer


OPEN, CLOSE = "<tool_call>", "</tool_call>"
TOOL_FORMAT = "tool_format"  # the key of a format's name in `tokenizer_config.json`
SHORT_CALL = 1024  # characters within which most calls end
MAX_LONG_FAILURES = 64  # long openings in an answer that turned out to be no call
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

    A malformed call is content, including its tags. Everything in the reasoning at the start of an
    answer is content, too, because a model may draft calls there. White space around calls is
    dropped, except between content before and after them.

    This class reads the format of the Hermes and Qwen models; another format is a subclass with its
    own `opens`, `marks`, `between` and `read`.

    <tool_call>
    {"name": "query", "arguments": {"sql": "SELECT 1"}}
    </tool_call>
    """

    opens: ClassVar[tuple[str, ...]] = (OPEN,)  # openings of a call
    # Marks of a call; they stay in the text even if they are special tokens.
    marks: ClassVar[tuple[str, ...]] = (OPEN, CLOSE)
    between: ClassVar[str] = ""  # characters that separate calls, besides white space

    def __init__(self, *, thinking: bool = False, tools: bytes = b"null") -> None:
        """thinking: whether the prompt has opened the reasoning. tools: the tools of the request,
        as JSON."""
        self.tools = tools
        self._text = ""  # not yet classified
        self._new: list[str] = []  # new text since then, of `_held` characters
        self._held = self._long_failures = 0
        tags = sorted(self.opens, key=len, reverse=True)
        self._opening = re.compile("|".join(map(re.escape, tags)))
        self._begun = self._thinking = thinking
        self._after_call = False
        self._has_content = False  # besides the reasoning
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
        items = self.push(text) + self.finish()
        content = "".join(item for item in items if isinstance(item, str))
        return content, [item for item in items if isinstance(item, ToolCall)]

    def read(self, text: str, *, last: bool) -> tuple[int, Sequence[Function]] | None:
        """Read the calls at the start of a text, which begins with one of `opens`; returns the
        number of characters read and the calls, or None if more text is needed. Without calls these
        characters are content, at least the opening. last: whether the text is complete."""
        inner = text[len(OPEN) :]
        if not inner.lstrip().startswith("{"):
            return (0, ()) if last or inner.strip() else None
        end = find_tag(inner, CLOSE, last=last)
        if end is None:
            return None
        function = decode_call(inner[:end])
        return (len(OPEN) + end + len(CLOSE), [function]) if function else (0, ())

    def _take(self, *, last: bool) -> list[str | ToolCall]:
        self._text += "".join(self._new)
        self._new.clear()
        self._held = self._wait = 0
        items = self._reasoning(last)
        if (not last and not self._begun) or self._thinking:
            return items
        text, at = self._text, 0
        while opening := self._opening.search(text, at):
            start, tag = opening.start(), opening[0]
            read = self._read(text, start, last=last)
            if read is None:
                # Reading all of a long call at each token would take time quadratic in its length.
                self._wait = (len(text) - start) * 17 // 16
                break
            before, end = text[at:start], start + read[0]
            if read[1]:
                content = "" if self._separates(before) else before.rstrip()
                items += self._content(content)
                if not self._after_call:
                    self._gap = before[len(before.rstrip()) :]
                items += [
                    ToolCall(id=f"call_{uuid4().hex}", function=function) for function in read[1]
                ]
                self._after_call = True
                self.count += len(read[1])
            else:
                end = max(end, start + len(tag))
                items += self._content(text[at:end])
            at = end
        self._text = text[at:]
        if last:
            return items + self._content(self._cut(len(self._text)))
        text = text[at : opening.start()] if opening else self._text
        ends = [len(text.rstrip())] if opening else [tag_start(text, tag) for tag in self.opens]
        end = min(ends)
        return items + self._content(self._cut(0 if self._separates(text[:end]) else end))

    def _read(self, text: str, start: int, *, last: bool) -> tuple[int, Sequence[Function]] | None:
        """Call `read` at a possible start of a call with a growing part of the text, in time linear
        in the whole answer. Each opening without an end would read all text after it, so after
        `MAX_LONG_FAILURES` failures only short calls are parsed."""
        size = SHORT_CALL
        while start + size < len(text):
            result = self.read(text[start : start + size], last=False)
            if result is None and self._long_failures >= MAX_LONG_FAILURES:
                return 0, ()
            if result is not None:
                break
            size *= 4
        else:
            result = self.read(text[start:], last=last)
        if result is not None and not result[1]:
            self._long_failures += size > SHORT_CALL
        return result

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
            stripped = text.lstrip()
            gap = self._gap or text[: len(text) - len(stripped)] or " "
            text = gap + stripped if stripped and self._has_content else stripped
        if not text:
            return []
        self._after_call, self._has_content = False, True
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
    """The first position of a tag outside of JSON strings, or the end of a complete text, which may
    have cut the tag; 0 for invalid JSON; None if more text is needed."""
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
    """A call from a JSON object with its name, and its arguments under the first existing key of
    `keys`; None if it is not a call."""
    try:
        call = msgspec.json.decode(written.strip(), type=dict[str, msgspec.Raw])
        name = msgspec.json.decode(call["name"], type=str)
    except (msgspec.DecodeError, RecursionError, UnicodeEncodeError, KeyError):
        return None
    arguments = next((bytes(call[key]).decode() for key in keys if key in call), "")
    return Function(name, arguments) if arguments.startswith("{") else None


Read = tuple[int, Sequence[Function]]  # the return type of `ToolParser.read`
PAIRS = {")": "(", "]": "[", "}": "{"}
ARGUMENTS = ("arguments", "parameters")
# Brackets and strings. The group of a string is its closing quote, or empty if more text could
# still close it; a quote that does not begin a string has no group.
JSON = re.compile(r'"(?:[^"\\\x00-\x1f]|\\.)*+("|\\?\Z)|["\[\]{}]')
PYTHON = re.compile(
    r"'(?:[^'\\\n]|\\.)*+('|\\?\Z)|\"(?:[^\"\\\n]|\\.)*+(\"|\\?\Z)|['\"()\[\]{}]", re.DOTALL
)


def value_end(text: str, start: int, tokens: re.Pattern[str] = JSON) -> int | None:
    """The end of a value that begins with the bracket at `start`; 0 if it is invalid, None if more
    text is needed."""
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
    """Parse JSON. Raises ValueError or RecursionError for invalid JSON, also for NaN and
    infinities."""

    def refuse(name: str) -> Json:
        raise ValueError(f"{name} is not JSON")

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
    calls = [decode_call(bytes(item).decode(), ARGUMENTS) for item in written]
    return end, [call for call in calls if call] if all(calls) else ()


def mark(words: str) -> str:
    """One of DeepSeek's special tokens, with its lookalike characters."""
    return f"<\uff5c{words.replace(' ', chr(0x2581))}\uff5c>"


DEEPSEEK_OPEN, DEEPSEEK_CLOSE = mark("tool calls begin"), mark("tool calls end")
DEEPSEEK_CALL, END, SEPARATOR = mark("tool call begin"), mark("tool call end"), mark("tool sep")


class DeepSeekV3(ToolParser):
    """Tool calls of DeepSeek V3 and R1: with a kind, and the arguments in a code block. A block
    that contains anything but calls is content.

    <｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>query
    ```json
    {"sql": "SELECT 1"}
    ```<｜tool▁call▁end｜><｜tool▁calls▁end｜>
    """

    opens: ClassVar[tuple[str, ...]] = (DEEPSEEK_OPEN,)
    marks: ClassVar[tuple[str, ...]] = (
        DEEPSEEK_OPEN,
        DEEPSEEK_CLOSE,
        DEEPSEEK_CALL,
        END,
        SEPARATOR,
    )
    head: ClassVar = re.compile(rf"\s*{DEEPSEEK_CALL}\w*{SEPARATOR}([^\n<]+)\n```json\n\s*(?=\{{)")
    tail: ClassVar[str] = f"\n```{END}"

    def read(self, text: str, *, last: bool) -> Read | None:
        size = find_tag(text[len(DEEPSEEK_OPEN) :], DEEPSEEK_CLOSE, last=last)
        if size is None:
            return None
        end = len(DEEPSEEK_OPEN) + size
        calls = self._calls(
            text[len(DEEPSEEK_OPEN) : end], cut=not text.startswith(DEEPSEEK_CLOSE, end)
        )
        return (end + len(DEEPSEEK_CLOSE), calls) if calls else (0, ())

    def _calls(self, text: str, *, cut: bool) -> list[Function]:
        """The calls of a block; none if it contains anything else. cut: its last tag may be
        missing."""
        calls, at = list[Function](), 0
        while head := self.head.match(text, at):
            end = value_end(text, head.end())
            if not end or not is_object(text[head.end() : end]):
                return []
            calls.append(Function(head[1].strip(), text[head.end() : end]))
            if cut and len(text) < end + len(self.tail) and self.tail.startswith(text[end:]):
                return calls
            if not text.startswith(self.tail, end):
                return []
            at = end + len(self.tail)
        return [] if text[at:].strip() else calls


class DeepSeekV31(DeepSeekV3):
    """Tool calls of DeepSeek V3.1: the same without kind and code block.

    <｜tool▁calls▁begin｜><｜tool▁call▁begin｜>tables<｜tool▁sep｜>{}<｜tool▁call▁end｜><｜tool▁calls▁end｜>
    """

    head: ClassVar = re.compile(rf"\s*{DEEPSEEK_CALL}([^\n<]+){SEPARATOR}\s*(?=\{{)")
    tail: ClassVar[str] = END


LLAMA_TAG = "<|python_tag|>"
KEYS = ("name", "type", *ARGUMENTS)
# The first key, and whether it is complete.
LLAMA_START = re.compile(r'\s*(\[\s*)?(\{)\s*(?:"(\w*)("?))?')


class Llama3Json(ToolParser):
    """Tool calls of Llama 3: JSON objects in the text, with semicolons or commas between several,
    or a list of them. Calls may follow a tag, and be anywhere in the content.

    {"name": "query", "parameters": {"sql": "SELECT 1"}}; {"name": "tables", "parameters": {}}
    [{"name": "query", "parameters": {"sql": "SELECT 1"}}, {"name": "tables", "parameters": {}}]
    """

    opens: ClassVar[tuple[str, ...]] = (LLAMA_TAG, "{", "[")
    marks: ClassVar[tuple[str, ...]] = (LLAMA_TAG,)
    between: ClassVar[str] = ";,"

    def read(self, text: str, *, last: bool) -> Read | None:
        tag = len(LLAMA_TAG) if text.startswith(LLAMA_TAG) else 0
        start = LLAMA_START.match(text, tag)
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


MISTRAL_TAG, ID, ARGS = "[TOOL_CALLS]", "[CALL_ID]", "[ARGS]"
NAMED = re.compile(r"\[TOOL_CALLS\]\s*([\w.-]+)(?:\[CALL_ID\]\w+)?(?:\[ARGS\])?\s*(?=\{)")
NAMED_START = re.compile(r"\[TOOL_CALLS\]\s*[\w.-]+(?:\[[A-Z_]*\]?\w*){0,2}")


class Mistral(ToolParser):
    """Tool calls of Mistral: after a token, a JSON list or, for newer models, names and arguments.
    A list that contains anything else is content.

    [TOOL_CALLS][{"name": "query", "arguments": {"sql": "SELECT 1"}}]
    [TOOL_CALLS]query[ARGS]{"sql": "SELECT 1"}[TOOL_CALLS]tables[ARGS]{}
    """

    opens: ClassVar[tuple[str, ...]] = (MISTRAL_TAG,)
    marks: ClassVar[tuple[str, ...]] = (MISTRAL_TAG, ID, ARGS)

    def read(self, text: str, *, last: bool) -> Read | None:
        named = NAMED.match(text)
        if named is None:
            if not last and NAMED_START.fullmatch(text.rstrip()):
                return None
            return read_list(text, len(MISTRAL_TAG), last=last)
        end = value_end(text, named.end())
        if end is None:
            return (len(text), ()) if last else None
        call = Function(named[1], text[named.end() : end])
        return end, [call] if is_object(call.arguments) else ()


WORD, PHI_OPEN, PHI_CLOSE = "functools", "<|tool_call|>", "<|/tool_call|>"


class Phi4MiniJson(ToolParser):
    """Tool calls of Phi-4-mini: a JSON list after a word or in tags. A list that contains anything
    else is content.

    functools[{"name": "query", "arguments": {"sql": "SELECT 1"}}]
    <|tool_call|>[{"name": "query", "arguments": {"sql": "SELECT 1"}}]<|/tool_call|>
    """

    opens: ClassVar[tuple[str, ...]] = (WORD, PHI_OPEN)
    marks: ClassVar[tuple[str, ...]] = (PHI_OPEN, PHI_CLOSE)

    def read(self, text: str, *, last: bool) -> Read | None:
        tagged = text.startswith(PHI_OPEN)
        result = read_list(text, len(PHI_OPEN if tagged else WORD), last=last)
        if result is None or not result[1] or not tagged:
            return result
        end, calls = result
        following = text[end:].lstrip()
        if following.startswith(PHI_CLOSE):
            return text.index(PHI_CLOSE, end) + len(PHI_CLOSE), calls
        if PHI_CLOSE.startswith(following):  # the tag may follow, or the end of the text has cut it
            return (len(text), calls) if last else None
        return result


PYTHONIC_START = re.compile(r"\[\s*[^\W\d][\w.-]*\s*\(")
MAYBE_START = re.compile(r"\[\s*(?:[^\W\d][\w.-]*\s*)?")
PYTHONIC_CALL = re.compile(r"\s*([^\W\d][\w.-]*)\s*(?=\()")
# Arguments may be named by Python's keywords here, such as "from".
ARGUMENT = re.compile(r"\s*([^\W\d][\w-]*)\s*=(?!=)(.*)", re.DOTALL)
NEXT = re.compile(r"\s*(,\s*|\Z)")


class Pythonic(ToolParser):
    """Tool calls as a list of calls in Python, of Llama 3.2 and 4, Gemma and others. Arguments are
    literals with names; a list that contains anything else is content.

    [query(sql="SELECT 1"), tables()]
    """

    opens: ClassVar[tuple[str, ...]] = ("[",)
    marks: ClassVar[tuple[str, ...]] = ()

    def read(self, text: str, *, last: bool) -> Read | None:
        if not PYTHONIC_START.match(text):
            return None if not last and MAYBE_START.fullmatch(text) else (0, ())
        end = value_end(text, 0, PYTHON)
        if end is None:
            return (len(text), ()) if last else None
        try:
            return end, _calls(text[1 : end - 1]) if end else ()
        except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError):
            return end, ()


def _calls(text: str) -> list[Function]:
    """Raises ValueError, or an error of `ast.literal_eval`, for anything but calls."""
    calls, at = list[Function](), 0
    while at < len(text):
        call = PYTHONIC_CALL.match(text, at)
        end = call and value_end(text, call.end(), PYTHON)
        if not call or not end or not (following := NEXT.match(text, end)):
            raise ValueError("not a list of calls")
        arguments = json.dumps(
            _arguments(text[call.end() + 1 : end - 1]), ensure_ascii=False, allow_nan=False
        )
        arguments.encode()  # rejects unpaired surrogates
        calls.append(Function(call[1], arguments))
        at = following.end()
    return calls


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
    while match := token.search(text, at):
        at = match.end()
        if match[0] == ",":
            parts.append(text[start : match.start()])
            start = at
        elif match[0] in ("(", "[", "{"):
            at = value_end(text, match.start(), PYTHON) or len(text)
    return [*parts, text[start:]] if text[start:].strip() else parts


def _literal(text: str) -> Json:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about unknown escapes
            value: Json = ast.literal_eval(text)
    except (ValueError, SyntaxError):
        return json_value(text)  # true, false and null, or values with them
    return value


FUNCTION = "<function="
HEAD = re.compile(rf"(?:{OPEN}\s*)?{FUNCTION}([^>\n]+)>\s*")
# A value on separate lines ends with a closing tag on a separate line, so it may contain the tag
# inside a line.
PARAMETER = re.compile(
    r"<parameter=([^>\n]+)>(?:\n(?:(.*?)\n)??|([^\n].*?)??)</parameter>(?:[^\S\n]*+\n\s*+)?"
    r"(?=<parameter=|</function>)",
    re.DOTALL,
)
TAIL = "</function>"


class Qwen3Coder(ToolParser):
    """Tool calls of Qwen3-Coder: XML with values as plain text; the tools define their types. The
    outer tags may be missing.

    <tool_call>
    <function=query>
    <parameter=sql>
    SELECT 1
    </parameter>
    </function>
    </tool_call>
    """

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
        """The end of a call, given the end of its function; None if more text is needed."""
        following = text[end:].lstrip()
        if following.startswith(CLOSE):
            return text.index(CLOSE, end) + len(CLOSE)
        if not CLOSE.startswith(following):
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
    types = schema.get("type")
    yield from [types] if isinstance(types, str) else types or ()
    for key in ("anyOf", "oneOf", "allOf"):
        for inner in schema.get(key) or ():
            yield from _named(inner)
    if not types and "enum" in schema:
        yield from {"string" if isinstance(value, str) else "any" for value in schema["enum"]}


def typed(text: str, types: frozenset[str] | None) -> Json:
    """The value of a parameter: text if it may be text and is not a value of another allowed type.
    types: None for a parameter that no tool defines."""
    if types is None or types == {"string"}:
        return text
    word = {"True": "true", "False": "false", "None": "null"}.get(text.strip(), text)
    try:
        value = json_value(word)
    except (ValueError, RecursionError):
        return text
    return text if isinstance(value, str) and "string" in types else value


KEY = "policy.tool_format"
TOOL_FORMATS: Mapping[str, type[ToolParser]] = {
    "hermes": ToolParser,
    "llama3_json": Llama3Json,
    "llama4_json": Llama3Json,
    "mistral": Mistral,
    "pythonic": Pythonic,
    "qwen3_coder": Qwen3Coder,
    "qwen3_xml": Qwen3Coder,
    "deepseek_v3": DeepSeekV3,
    "deepseek_v31": DeepSeekV31,
    "phi4_mini_json": Phi4MiniJson,
}


def load_format(name: str, root: Path) -> type[ToolParser]:
    """The parser of a tool format, one of `TOOL_FORMATS` or "file.py:name" in the folder `root`.
    Raises ConfigError for an unknown name."""
    if ":" in name:
        user_format: type[ToolParser] = load_attribute(name, root, key=KEY)
        return user_format
    if name not in TOOL_FORMATS:
        near = nearest(name, TOOL_FORMATS)
        raise ConfigError(f"{KEY} = {name!r}; {near}, or your own as file.py:name")
    return TOOL_FORMATS[name]


def parser_of(tokenizer: Tokenizer) -> type[ToolParser]:
    """The parser of a model's tool calls, by the name in its tokenizer's files, or
    "package.module:name"; Hermes' format by default. Raises ConfigError for an unknown name."""
    return load_format(tokenizer.init_kwargs.get(TOOL_FORMAT, "hermes"), Path())
