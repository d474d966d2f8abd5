"""Rows that are written to a file and read again, whatever their values."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest

from agentrl.base.row_files import read_rows, write_rows
from agentrl.errors import ConfigError

PARTS = [{"type": "text", "text": "Say hi"}]
TOLD = {"role": "user", "content": "Say hi"}
CALL = {"name": "look", "arguments": {"x": 1, "y": None}}
ROWS: dict[str, list[dict[str, Any]]] = {
    "columns of some rows": [{"chosen": "a", "rejected": "b"}, {"completion": "c", "margin": 0.5}],
    "texts that look like values": [{"a": "007"}, {"a": "null"}, {"a": "2026-01-02"}, {"a": "[1]"}],
    "several types": [{"a": "42"}, {"a": 42}, {"a": [1]}, {"a": True}, {"a": {"b": 1e-12}}],
    "a null that was written": [{"a": None}, {}, {"a": "null"}],
    "mixed contents": [{"m": [TOLD]}, {"m": [{"role": "user", "content": PARTS}]}],
    "arguments of tools": [{"c": [CALL]}, {"c": [{"name": "add", "arguments": {"z": "2"}}]}],
    "nothing inside": [{"a": {}, "b": [], "c": [{}]}],
    "numbers": [{"a": 2**64 - 1, "b": 5e-324}, {"a": -1, "b": 2**53 + 1}, {"a": True, "b": 1}],
}


@pytest.mark.parametrize("suffix", [".jsonl", ".parquet"])
@pytest.mark.parametrize("name", ROWS)
def test_what_is_written_is_read(name: str, suffix: str, tmp_path: Path) -> None:
    if suffix == ".parquet":
        pytest.importorskip("pyarrow", reason="pip install 'agentrl[data]'")
    file = tmp_path / f"t{suffix}"
    write_rows(ROWS[name], file)
    assert repr([row for _, row in read_rows(str(file))]) == repr(ROWS[name])


def test_columns_of_one_type_stay_typed(tmp_path: Path) -> None:
    pytest.importorskip("pyarrow", reason="pip install 'agentrl[data]'")
    from pyarrow import parquet

    rows = [{"text": "a", "ids": [1, 2], "talk": [TOLD], "score": 0.5}, {"text": "b", "score": 1}]
    write_rows(rows, tmp_path / "t.parquet")
    schema = parquet.read_schema(tmp_path / "t.parquet")
    assert [str(kind) for kind in schema.types] == [
        "string", "list<element: int64>",
        "list<element: struct<role: string, content: string>>", "double",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("name", "rows", "message"),
    [
        ("t.jsonl", [{"a": 1}, {"a": [math.nan]}], r"t\.jsonl: row 1\['a'\]\[0\] is nan"),
        ("t.parquet", [{"a": b"x"}], r"t\.parquet: row 0\['a'\] is of type bytes"),
        ("t.csv", [{"a": 1}], r"t\.csv: rows are written to a file that ends in \.jsonl or"),
    ],
)
def test_what_cannot_be_written_is_named(
    name: str, rows: list[Any], message: str, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=message):
        write_rows(rows, tmp_path / name)
    assert not (tmp_path / name).exists()
