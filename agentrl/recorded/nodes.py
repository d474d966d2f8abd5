"""What every format is read into: the nodes of a trace, and what people said about them.

A node is a span with what it was for: a model call, a use of a tool, or a step that has others
below it. What a format does not tell is missing: an empty text, None, or the time 0.
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
MAX_FIELD_CHARS = 200_000  # characters of one text that are kept; no context of a model has more
MAX_NUMBER = 1e300  # of feedback, costs, options
MAX_LITERAL_CHARS = 100_000  # characters of an object in Python that is read
EXAMPLES = 3  # sentences of one kind that are printed whole


class Call(msgspec.Struct, frozen=True, omit_defaults=True):
    """A model call, with messages and tools as chat completions have them."""

    messages: list[Object]
    answer: Object | None  # None: the trace does not have it
    tools: list[Object] = []
    model: str = ""
    finish: str = ""
    sampling: Object = {}  # temperature, top_p, max_tokens


class ToolUse(msgspec.Struct, frozen=True, omit_defaults=True):
    """A tool that was run. arguments: an object, or text that is none."""

    name: str
    arguments: Json = None
    result: Json = None
    schema: Object = {}  # the tool as chat completions have it; {}: unknown


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
    role: str = ""  # of the node of a graph, or the agent, that it is or is part of
    input: Json = None
    output: Json = None
    call: Call | None = None
    tool: ToolUse | None = None
    about: Object = {}  # numbers and names: tokens, cost, and others


class Note(msgspec.Struct, frozen=True, omit_defaults=True, tag=True):
    """Feedback about a trace, or a node of it. value: None if it is no number."""

    trace: str  # "": that of the node
    node: str
    name: str
    value: float | None = None
    text: str = ""
    correction: Json = None  # what should have been answered
    source: str = "feedback"
    key: str = ""  # its id, of formats that have one
    derived: bool = False  # from other feedback, which counts instead where it is there, too


class Issues:
    """Sentences about what is not read as it is, counted by kind."""

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()
        self.examples: dict[str, list[str]] = {}

    def add(self, kind: str, detail: str = "") -> None:
        """kind: the sentence, the same for all of its kind; detail: where, and what."""
        self.counts[kind] += 1
        shown = self.examples.setdefault(kind, [])
        if detail and len(shown) < EXAMPLES:
            shown.append(detail[:300])

    def lines(self) -> list[str]:
        """A sentence for each kind, with how often, and where at first."""
        found = []
        for kind, count in self.counts.most_common():
            shown = self.examples[kind]
            often = f" ({count} times)" if count > 1 else ""
            found.append(f"{kind}{often}" + (f": {'; '.join(shown)}" if shown else ""))
        return found


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
    """What a text of JSON says; anything else as it is."""
    if isinstance(value, str) and value[:1].strip() in ("{", "[", '"'):
        try:
            return msgspec.json.decode(value)
        except (msgspec.DecodeError, RecursionError):
            return value
    return value


def python_object(text: str) -> Any:
    """The object of a text, in JSON or, as LangChain writes the inputs of tools, in Python."""
    found = parsed(text)
    if isinstance(found, str) and len(text) < MAX_LITERAL_CHARS:
        try:
            return ast.literal_eval(text)
        except (ValueError, SyntaxError, MemoryError, RecursionError):
            return text
    return found


def json_text(value: Any) -> str:
    """A value as models write it: a text as it is, others as JSON with spaces."""
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def text_of(value: Any) -> str:
    """A value as a text; nothing for None."""
    return "" if value is None else json_text(value)


def obj(value: Any) -> Object:
    """The value if it is an object, an object in a text too; else an empty one."""
    value = parsed(value)
    return value if isinstance(value, dict) else {}


def rows(value: Any) -> list[Any]:
    """The value if it is a list, a list in a text too; else an empty one."""
    value = parsed(value)
    return value if isinstance(value, list) else []


def number(value: Any) -> float | None:
    """A finite number, true and false as 1 and 0; else None."""
    if isinstance(value, bool | int | float) and abs(value) < MAX_NUMBER:
        return float(value)
    return None


def usage(given: Any, cost: Any = None) -> Object:
    """Tokens and cost under the names of the semantic conventions."""
    given = obj(given)
    found = {
        "gen_ai.usage.input_tokens": first(given, "input_tokens", "prompt_tokens", "input"),
        "gen_ai.usage.output_tokens": first(given, "output_tokens", "completion_tokens", "output"),
        "gen_ai.usage.cost": cost,
    }
    return {key: value for key, value in found.items() if number(value) is not None}


def first(given: Object, *names: str) -> Any:
    """The first of the fields that is there and not null."""
    return next((given[name] for name in names if given.get(name) is not None), None)


SAMPLING = ("temperature", "top_p", "max_tokens")


def sampling(*given: Any) -> Object:
    """The options of sampling in the first of the objects that has each."""
    found: Object = {}
    for one in map(obj, given):
        more = one | {
            "max_tokens": first(one, "max_tokens", "max_completion_tokens", "max_output_tokens")
        }
        found |= {
            k: more[k] for k in SAMPLING if k not in found and number(more.get(k)) is not None
        }
    return found


def shortened(value: Any, issues: Issues, where: str) -> Any:
    """The value with texts that no model could have read cut off."""
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
        return [shortened(one, issues, where) for one in value]
    if isinstance(value, dict):
        return {key: shortened(one, issues, where) for key, one in value.items()}
    return value


def storable(value: Any) -> Any:
    """A value without what no store can have: integers of more than 64 bits, and NaN, as texts."""
    if isinstance(value, int) and not isinstance(value, bool):
        return value if -(2**63) <= value < 2**63 else str(value)
    if isinstance(value, float):
        return value if value == value and abs(value) != float("inf") else None
    if isinstance(value, dict):
        return {str(key): storable(one) for key, one in value.items()}
    return [storable(one) for one in value] if isinstance(value, list | tuple) else value


CUT = " …[cut off]"
