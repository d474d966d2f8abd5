"""Requests from the types of an SDK: one for each field that a request can have."""

from __future__ import annotations

import types
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import (
    Annotated,
    Any,
    Literal,
    NamedTuple,
    NotRequired,
    Required,
    Union,
    get_args,
    get_origin,
    get_type_hints,
)

from typing_extensions import is_typeddict

TEXT, OTHER = "YWJj", "enh6"  # base64, too
LISTS = (list, Iterable, Sequence)
MARKS = (Required, NotRequired)
SCHEMA = {"type": "object", "properties": {"q": {"type": "string"}}}
PLAIN: dict[Any, Any] = {str: TEXT, bool: True, int: 7, float: 0.625, object: SCHEMA, Any: SCHEMA}
OTHERS: dict[Any, Any] = {TEXT: OTHER, 7: 8, 0.625: 0.5}


class Sample(NamedTuple):
    """A value with a field, and the same without it, or with another value if it is required."""

    path: str  # such as input[].message.content[].input_text.text
    value: Any
    without: Any = None


def samples(kind: Any, path: str = "", inside: tuple[Any, ...] = ()) -> Iterator[Sample]:
    """Yield a sample of each field of a type, at any depth but inside of itself."""
    for one in _alternatives(kind):
        origin, arguments = get_origin(one), get_args(one)
        if is_typeddict(one):
            if one not in inside:
                yield from _fields(one, path, (*inside, one))
        elif origin is Literal:
            yield from (Sample(path, value) for value in arguments)
        elif origin in LISTS:
            for inner in samples(arguments[0], f"{path}[]", inside):
                without = None if inner.without is None else [inner.without]
                yield Sample(inner.path, [inner.value], without)
        else:
            yield Sample(path, _least(one))


def _fields(kind: Any, path: str, inside: tuple[Any, ...]) -> Iterator[Sample]:
    base, hints = _least(kind), get_type_hints(kind, include_extras=True)
    here = f"{path}.{base.get('type', '')}".rstrip(".") if path else ""
    if here and base:
        yield Sample(here, base)
    for name, hint in hints.items():
        rest = {key: value for key, value in base.items() if key != name}
        for path, value, without in samples(hint, f"{here}.{name}".lstrip("."), inside):
            if without is not None:
                yield Sample(path, base | {name: value}, base | {name: without})
            elif name not in base:
                yield Sample(path, rest | {name: value}, rest)
            elif isinstance(value, str | float) and not isinstance(value, bool):
                other = rest | {name: OTHERS[value]} if value in OTHERS else None
                yield Sample(path, rest | {name: value}, other)
            else:
                yield Sample(path, rest | {name: value})


def _alternatives(kind: Any) -> Iterator[Any]:
    while get_origin(kind) in (*MARKS, Annotated) or hasattr(kind, "__value__"):
        kind = kind.__value__ if hasattr(kind, "__value__") else get_args(kind)[0]
    if get_origin(kind) in (Union, types.UnionType):
        for one in get_args(kind):
            yield from _alternatives(one)
    elif kind is not type(None):
        yield kind


def _least(kind: Any) -> Any:
    """A value of a type that has only the required fields."""
    kind = next(_alternatives(kind))
    origin, arguments = get_origin(kind), get_args(kind)
    if is_typeddict(kind):
        hints = get_type_hints(kind, include_extras=True)
        needed = (n for n, h in hints.items() if n in kind.__required_keys__ or _required(h))
        return {name: _least(hints[name]) for name in needed}
    if origin is Literal:
        return arguments[0]
    if origin in LISTS:
        return [_least(arguments[0])]
    if origin in (dict, Mapping):
        return {"k": _least(arguments[1])}
    return PLAIN.get(kind, TEXT)


def _required(hint: Any) -> bool:
    return get_origin(hint) is Required
