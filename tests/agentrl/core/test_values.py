"""Users' objects as JSON: the same value whoever converts it, or an error that says where."""

from __future__ import annotations

import collections
import dataclasses
import datetime
import decimal
import enum
import math
import pathlib
import uuid
from typing import Any

import msgspec
import numpy as np
import pydantic
import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentrl.core import values
from agentrl.core.values import (
    NUMBERS,
    NotJsonError,
    as_json,
    check_json,
    json_values,
    msgpack_values,
)


class Colour(enum.Enum):
    RED = ("r", 1)


class Level(enum.StrEnum):
    LOW = "low"


@dataclasses.dataclass
class Step:
    number: int
    parts: Any


class Record(msgspec.Struct, tag=True):
    number: Any


class Model(pydantic.BaseModel):
    at: tuple[int, ...] = (1, 2)


class Loose(pydantic.BaseModel):
    value: Any


class Faulty(pydantic.BaseModel):
    def model_dump(self, **options: Any) -> Any:
        raise OSError("the disk is gone")


Pair = collections.namedtuple("Pair", ["a", "b"])
CONVERTED = [
    (np.int64(7), 7),
    (np.bool_(True), True),
    (np.float32(0.5), 0.5),
    (np.str_("a"), "a"),
    (np.arange(4).reshape(2, 2), [[0, 1], [2, 3]]),
    ({1: "a", np.int64(2): (3,), 1.5: None}, {"1": "a", "2": [3], "1.5": None}),
    (Pair(1, {2, 1}), [1, [1, 2]]),
    (Step(1, [Step(2, ())]), {"number": 1, "parts": [{"number": 2, "parts": []}]}),
    (Record(np.int64(3)), {"type": "Record", "number": 3}),
    ([Model()], [{"at": [1, 2]}]),
    (
        Loose(value={"a": (np.int64(7), Step(1, np.arange(2)))}),
        {"value": {"a": [7, {"number": 1, "parts": [0, 1]}]}},
    ),
    (Colour.RED, ["r", 1]),
    (Level.LOW, "low"),
    (decimal.Decimal("1.50"), "1.50"),
    (datetime.datetime(2026, 1, 2, 3), "2026-01-02T03:00:00"),
    (uuid.UUID(int=1), "00000000-0000-0000-0000-000000000001"),
    (pathlib.PurePosixPath("/a"), "/a"),
    (b"ab", "YWI="),
    (collections.deque([range(2)]), [[0, 1]]),
    ("\ud83d", "?"),
    (2**64 - 1, 2**64 - 1),
]


@pytest.mark.parametrize(("value", "plain"), CONVERTED)
def test_what_has_a_json_form(value: Any, plain: Any) -> None:
    found = as_json(value)
    assert (found, type(found)) == (plain, type(plain))
    assert repr(msgspec.json.decode(msgspec.json.encode(found))) == repr(found)


LOOP: list[Any] = []
LOOP.append(LOOP)


@pytest.mark.parametrize(
    ("value", "problem"),
    [
        ({"a": [0, {"b": math.nan}]}, "x['a'][1]['b'] is nan"),
        (np.array([1.0, math.inf]), "x[1] is inf"),
        (Step(1, (object(),)), "x['parts'][0] is of type 'object'"),
        ([Record(1j)], "x[0] is of type 'complex'"),
        ([{(1, 2): 3}], "x[0][(1, 2)] has a key of type 'tuple'"),
        ({1: "a", "1": "b"}, "x has keys that are the same text"),
        (-(2**63) - 1, "x is an integer of more than 64 bits"),
        ([10**5000], "x[0] is an integer of more than 64 bits"),
        ([Loose(value=object())], "x[0] is of type 'object'"),
        ([Loose(value=[np.float32("nan")])], "x[0] is nan"),
        ({"m": Faulty()}, "x['m'] is of type 'Faulty' and cannot be converted: OSError: the disk"),
        (LOOP, "nests too deeply, or contains itself"),
        (iter([1]), "x is of type 'list_iterator'"),
        (np.longdouble(1), "x is of type 'longdouble'"),
    ],
)
def test_what_has_none(value: Any, problem: str) -> None:
    for check in (as_json, check_json):
        with pytest.raises(NotJsonError) as error:
            check(value)
        if check is as_json:
            assert problem in error.value.at("x")


scalars = (
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**64 - 1)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(max_size=4)
)
json = st.recursive(
    scalars,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner),
    max_leaves=9,
)


@given(json)
def test_json_stays_as_it_is(value: Any) -> None:
    check_json(value)
    assert repr(as_json(value)) == repr(value)
    assert repr(msgspec.json.decode(msgspec.json.encode(value))) == repr(value)


@pytest.mark.parametrize("value", [value for value, _ in CONVERTED[:-1] if value is not Level.LOW])
def test_what_changes_is_not_json_as_it_is(value: Any) -> None:
    with pytest.raises(NotJsonError, match=r"comes back from JSON as|which is text in JSON"):
        check_json(value)


def test_subclasses_that_come_back_equal_are_json() -> None:
    check_json([collections.OrderedDict(a=Level.LOW), collections.defaultdict(int, b=1)])


# -- values of a body, counted without decoding it -------------------------------------------------


MANY = 10**9
SCALARS = st.none() | st.booleans() | st.integers(-(2**63), 2**63 - 1) | st.text() | st.floats()
VALUES = st.recursive(
    SCALARS, lambda inner: st.lists(inner) | st.dictionaries(st.text(), inner), max_leaves=30
)


def counted(value: Any) -> tuple[int, int]:
    """Texts, lists and objects with their keys; numbers and the like."""
    if isinstance(value, dict):
        own = [counted(item) for item in value.values()]
        return sum(n for n, _ in own) + len(value) + 1, sum(n for _, n in own)
    if isinstance(value, list):
        own = [counted(item) for item in value]
        return sum(n for n, _ in own) + 1, sum(n for _, n in own)
    return (1, 0) if isinstance(value, str) else (0, 1)


@given(VALUES)
def test_values_are_those_that_a_decoder_makes(value: Any) -> None:
    values, numbers = counted(value)
    assert msgpack_values(msgspec.msgpack.encode(value), MANY) == values + numbers // NUMBERS
    text = msgspec.json.encode(value)
    commas = values + numbers
    assert values <= json_values(text, MANY) <= values + commas // NUMBERS


@pytest.mark.parametrize("size", [1, 2, 3, 7, 64])
def test_slices_change_nothing(monkeypatch: pytest.MonkeyPatch, size: int) -> None:
    value = {'a "b\\': ["[{,", "\\\\", '\\"', {}, [[]], 1, 2.5, None], "": '"'}
    text = msgspec.json.encode(value)
    whole = json_values(text, MANY)
    monkeypatch.setattr(values, "SLICE", size)
    assert json_values(text, MANY) == whole == 12


def test_counting_ends_early(monkeypatch: pytest.MonkeyPatch) -> None:
    assert 100 < json_values(b"[" * 10_000_000, 100) <= values.SLICE
    assert msgpack_values(b"\x90" * 10_000_000, 100) == 101


def test_extension_and_binary_types_are_skipped() -> None:
    raw = bytes(range(256)) * 300
    for value in (b"", raw[:40], raw[:300], raw, msgspec.msgpack.Ext(5, raw), raw.hex()):
        assert msgpack_values(msgspec.msgpack.encode([value, 1]), MANY) == 2
