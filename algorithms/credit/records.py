"""Search, change and format the nested records of a credit."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import fields, is_dataclass, replace
from math import inf
from typing import Any


def nested_records(part: object) -> Iterator[object]:
    """Yield a credit and every record inside it, outermost first."""
    inside = part if isinstance(part, tuple) else ()
    if is_dataclass(part) and not isinstance(part, type):
        yield part
        inside = tuple(getattr(part, item.name) for item in fields(part))
    for item in inside:
        yield from nested_records(item)


def rewards_read(*parts: object) -> tuple[str, ...]:
    """The reward references that credits read: every `reward` field that is a string, in order."""
    found = (getattr(record, "reward", None) for record in nested_records(parts))
    return tuple(dict.fromkeys(name for name in found if isinstance(name, str)))


def map_records(part: Any, change: Callable[[Any], Any]) -> Any:
    """A copy of a credit with `change` applied to every record inside it, innermost first."""
    if isinstance(part, tuple):
        return tuple(map_records(item, change) for item in part)
    if not is_dataclass(part) or isinstance(part, type):
        return part
    inner = {item.name: map_records(getattr(part, item.name), change) for item in fields(part)}
    return change(replace(part, **inner))


def format_record(record: object, leave_out: tuple[str, ...] = ()) -> str:
    """Format a record with the fields that differ from their defaults, GroupRelative('outcome',
    norm='std'), or one with only numbers with all that are finite, Clip(0.2, hi=0.28)."""
    if isinstance(record, tuple):
        return f"({', '.join(map(format_record, record))}{',' if len(record) == 1 else ''})"
    if not is_dataclass(record) or isinstance(record, type):
        return getattr(record, "__name__", repr(record))
    shown = []
    numeric = all(isinstance(getattr(record, field.name), float) for field in fields(record))
    for number, field in enumerate(fields(record)):
        value = getattr(record, field.name)
        usual = value == (inf if numeric else field.default)
        if field.name in leave_out or (number and usual):
            continue
        shown.append(f"{field.name}={format_record(value)}" if number else format_record(value))
    return f"{type(record).__name__}({', '.join(shown)})"
