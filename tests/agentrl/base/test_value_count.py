"""Values of a body, counted without decoding it."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from agentrl.base import value_count
from agentrl.base.value_count import NUMBERS, json_values, msgpack_values

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
    monkeypatch.setattr(value_count, "SLICE", size)
    assert json_values(text, MANY) == whole == 12


def test_counting_ends_early(monkeypatch: pytest.MonkeyPatch) -> None:
    assert 100 < json_values(b"[" * 10_000_000, 100) <= value_count.SLICE
    assert msgpack_values(b"\x90" * 10_000_000, 100) == 101


def test_extension_and_binary_types_are_skipped() -> None:
    raw = bytes(range(256)) * 300
    for value in (b"", raw[:40], raw[:300], raw, msgspec.msgpack.Ext(5, raw), raw.hex()):
        assert msgpack_values(msgspec.msgpack.encode([value, 1]), MANY) == 2
