"""JSON values: the one conversion of users' objects, and how many values a body has.

Results of agents and fields of tasks are converted. A value that has been stored, sent to another
process or read from a file is equal to its conversion here, so a verifier sees the same whichever
executor ran the agent.

| Python | JSON |
|---|---|
| tuples, sets, ranges, numpy arrays and tensors | lists; sets in sorted order if they have one |
| mappings, dataclasses, attrs classes, msgspec structs, pydantic models | objects |
| int, float and bool keys | their text |
| numpy numbers, enums | their values |
| dates, times, UUIDs, decimals, paths | their text |
| bytes | base64 |

Nothing else is guessed: objects without a JSON form, NaN, infinite numbers and integers of more
than 64 bits are errors with the path inside the value.

The values of a body are counted from its bytes before it is decoded: a decoder holds Python's lock
until it is done, so while it makes millions of small objects, in any thread, a server answers no
request. The counts end early, and let other threads run meanwhile. Decoders make numbers much
faster than strings, lists and objects: `NUMBERS` of them count as one value.
"""

from __future__ import annotations

import dataclasses
import enum
import math
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set, ValuesView
from contextlib import contextmanager
from typing import Any

import msgspec

from agentrl.core.types import Json
from agentrl.core.user_code import contained, text_of

# What msgpack, hence the store's HTTP API, can represent.
MIN_INTEGER, MAX_INTEGER = -(2**63), 2**64 - 1


class NotJsonError(ValueError):
    """A value without a JSON form. `path`: where it is, outermost first."""

    def __init__(self, problem: str) -> None:
        super().__init__(problem)
        self.problem, self.path = problem, list[str]()

    def at(self, root: str) -> str:
        """Return the sentence about a value that is called `root`."""
        return f"{root}{''.join(reversed(self.path))} {self.problem}"


Convert = Callable[[Any], Json]


def as_json(value: Any) -> Json:
    """Convert `value` to strings, numbers, booleans, None, lists and dicts with string keys.

    Raises NotJsonError, also in place of any exception of the user's classes."""
    with _explained():
        return _plain(value)


def check_json(value: Any) -> None:
    """Raise NotJsonError if `value` is not equal to its JSON form when that is read again."""
    try:
        with contained():
            msgspec.msgpack.encode(value)  # refuses integers that `_fitting` refuses
            if msgspec.json.decode(msgspec.json.encode(value)) == value:
                return  # the fast path; the rest finds the place of an error
    except Exception:  # noqa: BLE001 - the code below raises it again
        pass
    with _explained():
        _unchanged(value)


@contextmanager
def _explained() -> Iterator[None]:
    try:
        with contained():
            yield
    except NotJsonError:
        raise
    except RecursionError:
        raise NotJsonError("nests too deeply, or contains itself") from None
    except Exception as error:  # code of the user's classes may raise anything
        raise NotJsonError(f"cannot be converted: {text_of(error):.200}") from error


def _plain(value: Any) -> Json:
    if isinstance(value, str):
        return _text(str.__str__(value))
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, int):
        return _fitting(int.__int__(value))
    if isinstance(value, float):
        return _finite(float.__float__(value))
    if isinstance(value, Mapping):
        return _object(value, _plain)
    if isinstance(value, list | tuple):
        return _array(value, _plain)
    return _converted(value)


def _unchanged(value: Any) -> Json:
    if isinstance(value, dict):
        for key in value:
            if not isinstance(key, str):
                raise NotJsonError(f"has the key {key!r:.80}, which is text in JSON: write it so")
        return _object(value, _unchanged)
    if isinstance(value, list):
        return _array(value, _unchanged)
    plain, kind = _plain(value), type(value)
    if (type(plain) is kind or isinstance(value, enum.Enum)) and plain == value:
        return plain
    raise NotJsonError(
        f"is of type {kind.__module__}.{kind.__qualname__}, and comes back from JSON as"
        f" {_short(plain)}: write it so, as the verifier will see it".replace("builtins.", "")
    )


def _short(plain: Json) -> str:
    text = repr(plain)
    return f"{type(plain).__name__} {text if len(text) <= 60 else text[:57] + '...'}"


def _array(values: Iterable[Any], convert: Convert) -> list[Json]:
    items: list[Json] = []
    try:
        for value in values:
            items.append(convert(value))  # noqa: PERF401 - its length is the index of the error
    except NotJsonError as error:
        error.path.append(f"[{len(items)}]")
        raise
    return items


def _object(values: Mapping[Any, Any], convert: Convert) -> dict[str, Json]:
    converted: dict[str, Json] = {}
    for key, value in values.items():
        try:
            name = key if type(key) is str else _key(key)
            converted[_text(name)] = convert(value)
        except NotJsonError as error:
            error.path.append(f"[{key!r:.80}]")
            raise
    if len(converted) < len(values):
        raise NotJsonError("has keys that are the same text in JSON, such as 1 and '1'")
    return converted


def _key(key: Any) -> str:
    plain = _plain(key)
    if isinstance(plain, list | dict) or plain is None:
        raise NotJsonError(f"has a key of type {type(key).__name__!r}: write it as text")
    return plain if isinstance(plain, str) else msgspec.json.encode(plain).decode()


def _text(text: str) -> str:
    """Replace lone surrogates, which UTF-8 does not have, by `?`."""
    return text.encode("utf-8", "replace").decode()


def _fitting(number: int) -> int:
    if not MIN_INTEGER <= number <= MAX_INTEGER:
        raise NotJsonError("is an integer of more than 64 bits: give it as text or as a float")
    return number


def _finite(number: float) -> float:
    if not math.isfinite(number):
        raise NotJsonError(f"is {number}, which JSON does not have: give None or text")
    return number


def _converted(value: Any) -> Json:
    """Convert an object that is none of JSON's own types."""
    try:
        with contained():
            parts = _parts(value)
    except NotJsonError:
        raise
    except Exception as error:  # code of the user's class may raise anything
        raise NotJsonError(
            f"is of type {type(value).__name__!r} and cannot be converted: {text_of(error):.200}"
        ) from error
    if type(parts) is type(value):
        raise NotJsonError(_no_form(value))
    return _plain(parts)


def _parts(value: Any) -> Any:
    """Return the parts of an object, one step closer to JSON, or the object itself if it has
    none."""
    if isinstance(value, enum.Enum):
        return value.value
    if not isinstance(value, type):
        if callable(dump := getattr(value, "model_dump", None)):  # pydantic
            try:
                return dump(mode="json")
            except ValueError:  # it has parts that pydantic does not know, such as numpy's
                return dump(mode="json", fallback=_plain)
        if callable(convert := getattr(value, "tolist", None)):  # numpy
            return convert()
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        names = (field.name for field in dataclasses.fields(value))
        return {name: getattr(value, name) for name in names if hasattr(value, name)}
    if isinstance(value, Set):
        return _sorted(value)
    if isinstance(value, Sequence | ValuesView) and not isinstance(value, bytes | bytearray):
        return [*value]
    if isinstance(value, os.PathLike):
        return os.fspath(value)

    def convert_inside(other: Any) -> Json:
        if other is value:
            raise NotJsonError(_no_form(value))
        return _plain(other)

    return msgspec.to_builtins(value, str_keys=True, enc_hook=convert_inside)


def _no_form(value: Any) -> str:
    kind = type(value).__name__
    return f"is of type {kind!r}, which has no JSON form: give text, numbers, lists or dicts"


def _sorted(values: Set[Any]) -> list[Any]:
    try:
        return sorted(values)
    except TypeError:
        return list(values)


SMALL_BODY = 2**20  # bytes that are decoded in a moment
NUMBERS = 8
SLICE = 2**18  # bytes of JSON that are scanned at a time
_OTHER = bytes(set(range(256)) - set(b'",[{'))  # bytes that neither separate nor enclose values
# MessagePack, by first byte. Bytes of a number; bytes of the length of a text or the like, and
# bytes of a type after it; bytes of the number of items of a list or map.
_NUMBERS = {0xCA: 4, 0xCB: 8, 0xCC: 1, 0xCD: 2, 0xCE: 4, 0xCF: 8, 0xD0: 1, 0xD1: 2, 0xD2: 4}
_NUMBERS |= {0xD3: 8, 0xD4: 2, 0xD5: 3, 0xD6: 5, 0xD7: 9, 0xD8: 17}
_LENGTHS = {0xC4: (1, 0), 0xC5: (2, 0), 0xC6: (4, 0), 0xD9: (1, 0), 0xDA: (2, 0), 0xDB: (4, 0)}
_LENGTHS |= {0xC7: (1, 1), 0xC8: (2, 1), 0xC9: (4, 1)}
_ITEMS = {0xDC: 2, 0xDD: 4, 0xDE: 2, 0xDF: 4}


def json_values(body: bytes, limit: int) -> int:
    """The number of values of a JSON text, or a number above `limit`."""
    quotes = commas = openings = at = values = 0
    while at < len(body) and values <= limit:
        end = at + SLICE
        while body[end - 1 : end] == b"\\":  # it escapes the next byte
            end += 1
        part = body[at:end].replace(b"\\\\", b"").replace(b'\\"', b"")
        pieces = part.translate(None, _OTHER).split(b'"')
        outside = b"".join(pieces[quotes % 2 :: 2])
        commas += outside.count(b",")
        openings += len(outside) - outside.count(b",")
        quotes, at = quotes + len(pieces) - 1, end
        values = quotes // 2 + openings + commas // NUMBERS
    return values


def msgpack_values(body: bytes, limit: int) -> int:
    """The number of values of a MessagePack body, or a number above `limit`."""
    at = numbers = values = 0
    while at < len(body) and values + numbers // NUMBERS <= limit:
        first = body[at]
        at += 1
        if first <= 0x7F or first >= 0xE0 or first in (0xC0, 0xC2, 0xC3):
            numbers += 1
        elif first in _NUMBERS:
            numbers += 1
            at += _NUMBERS[first]
        else:
            values += 1
            if 0xA0 <= first <= 0xBF:  # a short text
                at += first & 0x1F
            elif first in _LENGTHS:
                size, kind = _LENGTHS[first]
                at += size + kind + int.from_bytes(body[at : at + size])
            else:
                at += _ITEMS.get(first, 0)
    return values + numbers // NUMBERS


def question_of(task_input: Json) -> str:
    """The question in a task's input: the text itself, or the text of the last user message."""
    if isinstance(task_input, str):
        return task_input
    messages = (
        [message for message in task_input if isinstance(message, dict)]
        if isinstance(task_input, list)
        else []
    )
    contents = [message.get("content") for message in messages if message.get("role") == "user"]
    return _content(contents[-1]) if contents else msgspec.json.encode(task_input).decode()


def _content(content: Json) -> str:
    parts = content if isinstance(content, list) else [content]
    texts = (part.get("text") if isinstance(part, dict) else part for part in parts)
    return "\n".join(text for text in texts if isinstance(text, str))


def normal_text(text: str) -> str:
    """Normalise a text, so that different spellings of an answer are equal: without case, spaces,
    thousands separators, quotation marks and markup; a number by its value."""
    stripped = re.sub(r"[\s,$*`\"'_]", "", text).casefold().strip(".")
    try:
        return repr(float(stripped))
    except ValueError:
        return stripped


MARKED = (
    # An unclosed tag extends to the end of the text, so that many of them take linear time.
    re.compile(r"<answer>(.*?)(?:</answer>|(?P<unclosed>\Z))", re.DOTALL | re.IGNORECASE),
    re.compile(r"\\boxed\{((?:[^{}]|\{[^{}]*\})*)\}"),
    re.compile(r"^[ \t]*####[ \t]*(\S.*)$", re.MULTILINE),
    re.compile(r"^\W{0,4}(?:final )?answer\W{0,3}:\W{0,3}\s*(.+?)\W{0,2}$", re.M | re.I),
)


def marked_answer(text: str) -> str:
    """The answer that a text marks: in <answer> tags, \\boxed{}, after "####" or "Answer:"; the
    whole text if none is marked; empty if two different ones are."""
    marked = (match for mark in MARKED for match in mark.finditer(text))
    answers = {match[1].strip() for match in marked if match.groupdict().get("unclosed") is None}
    if len(answers) > 1:
        return ""
    return answers.pop() if answers else text.strip()
