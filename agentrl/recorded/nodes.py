"""The common form of all formats: the nodes of a trace, and people's feedback on them. A node is a
span with its content: a model call, a use of a tool, or a step with child nodes. Missing
information is an empty text, None, or the time 0.
"""

from __future__ import annotations

import ast
import json
from collections import Counter
from datetime import UTC, datetime
from typing import Any

import msgspec

from agentrl.core.types import Json

Object = dict[str, Any]
MAX_FIELD_CHARS = 200_000  # characters of a text that are kept, more than any model's context
MAX_NUMBER = 1e300  # for feedback, costs, options
MAX_LITERAL_CHARS = 100_000  # characters of a Python literal that is parsed
EXAMPLES = 3  # details that are printed per kind


class Call(msgspec.Struct, frozen=True, omit_defaults=True):
    """A model call, with messages and tools in the format of chat completions."""

    messages: list[Object]
    answer: Object | None  # None: the trace does not have it
    tools: list[Object] = []
    model: str = ""
    finish: str = ""
    sampling: Object = {}  # temperature, top_p, max_tokens


class ToolUse(msgspec.Struct, frozen=True, omit_defaults=True):
    """A tool that was run. arguments: an object, or text if it cannot be parsed."""

    name: str
    arguments: Json = None
    result: Json = None
    schema: Object = {}  # the tool in the format of chat completions; {}: unknown


class Node(msgspec.Struct, frozen=True, omit_defaults=True, tag=True):
    """A span of a trace. Times are unix nanoseconds, 0: unknown."""

    trace: str
    id: str
    parent: str = ""
    name: str = ""
    kind: str = "internal"  # agent, chain, tool, llm or internal
    start: int = 0
    end: int = 0
    error: str = ""  # why it failed; "": it did not
    role: str = ""  # graph node or agent that the span is, or is part of
    input: Json = None
    output: Json = None
    call: Call | None = None
    tool: ToolUse | None = None
    about: Object = {}  # numbers and names: tokens, cost, and others


class Note(msgspec.Struct, frozen=True, omit_defaults=True, tag=True):
    """Feedback on a trace or a node. value: None if it is not a number."""

    trace: str  # "": the trace of the node
    node: str
    name: str
    value: float | None = None
    text: str = ""
    correction: Json = None  # the right answer
    source: str = "feedback"
    key: str = ""  # id of the feedback, if the format has one
    derived: bool = False  # computed from other feedback, which is used instead if present


class Issues:
    """Messages about changed or skipped data, counted by kind."""

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()
        self.examples: dict[str, list[str]] = {}

    def add(self, kind: str, detail: str = "") -> None:
        """kind: a message that is the same for all issues of its kind; detail: the place and the
        value."""
        self.counts[kind] += 1
        shown = self.examples.setdefault(kind, [])
        if detail and len(shown) < EXAMPLES:
            shown.append(detail[:300])

    def lines(self) -> list[str]:
        """A line for each kind, with its count and the first places."""
        lines = []
        for kind, count in self.counts.most_common():
            shown = self.examples[kind]
            often = f" ({count} times)" if count > 1 else ""
            lines.append(f"{kind}{often}" + (f": {'; '.join(shown)}" if shown else ""))
        return lines


def nanoseconds(value: Any) -> int:
    """A time of a format: ISO 8601, or a number of seconds, milliseconds, microseconds or
    nanoseconds since 1970, told apart by size. 0 for anything else."""
    if isinstance(value, datetime):
        return _of_datetime(value)
    if isinstance(value, str):
        text = value.strip()
        if text.isdigit():
            return nanoseconds(int(text))
        try:
            return _of_datetime(datetime.fromisoformat(text.replace("Z", "+00:00")))
        except ValueError:
            return 0
    if isinstance(value, bool) or not isinstance(value, int | float) or not value > 0:
        return 0
    if value != value or value > 2**63 - 1:
        return 0
    scale = next(scale for limit, scale in _SCALES if value < limit)
    return int(value * scale)


_SCALES = ((1e11, 10**9), (1e14, 10**6), (1e17, 10**3), (float("inf"), 1))


def _of_datetime(value: datetime) -> int:
    if value.tzinfo is None:
        value = value.replace(tzinfo=UTC)
    whole = int(value.replace(microsecond=0).timestamp())
    return max(0, whole * 10**9 + value.microsecond * 1000)


def parsed(value: Any) -> Any:
    """The value of a JSON text; anything else unchanged."""
    if isinstance(value, str) and value[:1].strip() in ("{", "[", '"'):
        try:
            return msgspec.json.decode(value)
        except (msgspec.DecodeError, RecursionError):
            return value
    return value


def python_object(text: str) -> Any:
    """The object of a text, in JSON or, as LangChain writes the inputs of tools, in Python."""
    value = parsed(text)
    if isinstance(value, str) and len(text) < MAX_LITERAL_CHARS:
        try:
            return ast.literal_eval(text)
        except (ValueError, SyntaxError, MemoryError, RecursionError):
            return text
    return value


def json_text(value: Any) -> str:
    """A value as models write it: text unchanged, anything else as JSON with spaces."""
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def text_of(value: Any) -> str:
    """A value as text; empty for None."""
    return "" if value is None else json_text(value)


def obj(value: Any) -> Object:
    """The value if it is an object or a JSON text of one; else an empty object."""
    value = parsed(value)
    return value if isinstance(value, dict) else {}


def rows(value: Any) -> list[Any]:
    """The value if it is a list or a JSON text of one; else an empty list."""
    value = parsed(value)
    return value if isinstance(value, list) else []


def number(value: Any) -> float | None:
    """A finite number, true and false as 1 and 0; else None."""
    if isinstance(value, bool | int | float) and abs(value) < MAX_NUMBER:
        return float(value)
    return None


def usage(tokens: Any, cost: Any = None) -> Object:
    """Tokens and cost under the names of the semantic conventions."""
    tokens = obj(tokens)
    counts = {
        "gen_ai.usage.input_tokens": first(tokens, "input_tokens", "prompt_tokens", "input"),
        "gen_ai.usage.output_tokens": first(tokens, "output_tokens", "completion_tokens", "output"),
        "gen_ai.usage.cost": cost,
    }
    return {key: value for key, value in counts.items() if number(value) is not None}


def first(fields: Object, *names: str) -> Any:
    """The value of the first field that is present and not null."""
    return next((fields[name] for name in names if fields.get(name) is not None), None)


SAMPLING = ("temperature", "top_p", "max_tokens")


def sampling(*sources: Any) -> Object:
    """The sampling options, each from the first object that has it."""
    options: Object = {}
    for source in map(obj, sources):
        more = source | {
            "max_tokens": first(source, "max_tokens", "max_completion_tokens", "max_output_tokens")
        }
        options |= {
            k: more[k] for k in SAMPLING if k not in options and number(more.get(k)) is not None
        }
    return options


def shortened(value: Any, issues: Issues, where: str) -> Any:
    """The value, with texts cut off after MAX_FIELD_CHARS."""
    if isinstance(value, str):
        if len(value) <= MAX_FIELD_CHARS:
            return value
        issues.add(
            f"a text of more than {MAX_FIELD_CHARS} characters was cut off, and its call is no"
            " demonstration",
            f"{where}: {len(value)} characters",
        )
        return value[:MAX_FIELD_CHARS] + CUT
    if isinstance(value, list):
        return [shortened(item, issues, where) for item in value]
    if isinstance(value, dict):
        return {key: shortened(item, issues, where) for key, item in value.items()}
    return value


def storable(value: Any) -> Any:
    """A value that the store accepts: integers of more than 64 bits and NaN become texts."""
    if isinstance(value, int) and not isinstance(value, bool):
        return value if -(2**63) <= value < 2**63 else str(value)
    if isinstance(value, float):
        return value if value == value and abs(value) != float("inf") else None
    if isinstance(value, dict):
        return {str(key): storable(item) for key, item in value.items()}
    return [storable(item) for item in value] if isinstance(value, list | tuple) else value


CUT = " …[cut off]"
