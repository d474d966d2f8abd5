"""Tasks from files of other projects, and the sentences about files that have none."""

from __future__ import annotations

import base64
import datetime
import decimal
import json
import math
import sys
from pathlib import Path
from typing import Any

import pytest

from agentrl.core.data_files import read_rows, write_rows
from agentrl.core.errors import ConfigError
from agentrl.core.loading import load_tasks

CHAT = [{"role": "user", "content": "2+2?"}]


def tasks_in(file: Path, **columns: str) -> list[dict[str, Any]]:
    return load_tasks(file.name, file.parent, key="tasks.train", columns=columns)


def write(folder: Path, name: str, text: str | bytes) -> Path:
    (folder / name).write_bytes(text if isinstance(text, bytes) else text.encode())
    return folder / name


# What polars 1.44 writes: DataFrame({"score": [2**64 - 1]}, schema={"score": Int128}).
INT128 = """
UEFSMRUAFSwVLCwVAhUAFQYVBgAAAgAAAAIB//////////8AAAAAAAAAABUOGSUABhkYBXNjb3JlFQAWAhZOFk4m
CAAZHBYIFU4WAAAAFQIZLEgEcm9vdBUCABUOFSAVAhgFc2NvcmUAFgIZHBkcJlYcFQ4ZJQAGGRgFc2NvcmUVABYC
Fk4WTiYIABaIARUUABZOFgImCBZOFAAAGRwYDEFSUk9XOnNjaGVtYRiwAS8vLy8vM29BQUFBRUFBQUE4di8vL3hR
QUFBQUVBQUVBQUFBS0FBc0FDQUFLQUFRQStQLy8vd3dBQUFBSUFBZ0FBQUFFQUFFQUFBQUVBQUFBN1AvLy96Z0FB
QUFnQUFBQUdBQUFBQUVDQUFBUUFCSUFCQUFRQUJFQUNBQUFBQXdBQUFBQUFQVC8vLytBQUFBQUFRQUFBQWdBQ1FB
RUFBZ0FCUUFBQUhOamIzSmxBQT09ABgGUG9sYXJzGRwcAAAAIAEAAFBBUjE=
"""


def test_a_column_of_a_type_that_arrow_does_not_have_is_named(tmp_path: Path) -> None:
    pytest.importorskip("pyarrow", reason="pip install 'agentrl[data]'")
    file = write(tmp_path, "t.parquet", base64.b64decode(INT128))
    with pytest.raises(
        ConfigError, match=r"column 'score' of t\.parquet cannot be read \(Integers"
    ):
        tasks_in(file)


@pytest.fixture
def parquet(tmp_path: Path) -> Any:
    """Writes a table and returns its file."""
    arrow = pytest.importorskip("pyarrow", reason="pip install 'agentrl[data]'")
    from pyarrow import parquet

    def made(rows: list[dict[str, Any]], schema: Any = None) -> Path:
        parquet.write_table(arrow.Table.from_pylist(rows, schema), tmp_path / "t.parquet")
        return tmp_path / "t.parquet"

    return made


def test_csv(tmp_path: Path) -> None:
    text = '\ufeffquestion,answer\r\n"a, ""b""\nc",1\r\n\r\nd,\r\n'
    file = write(tmp_path, "t.CSV", text)
    assert tasks_in(file) == [
        {"input": 'a, "b"\nc', "question": 'a, "b"\nc', "answer": "1"},
        {"input": "d", "question": "d", "answer": ""},
    ]
    assert tasks_in(file, input="answer", id="question")[0]["input"] == "1"
    long = write(tmp_path, "long.csv", "input\n" + "x" * 300_000)
    assert len(tasks_in(long)[0]["input"]) == 300_000


def test_json(tmp_path: Path) -> None:
    rows = [{"prompt": CHAT, "input": "no", "n": 2**63}, {"prompt": "x", "n": None}]
    for name, text in {
        "array.json": json.dumps(rows),
        "lines.json": "\n".join(map(json.dumps, rows)),
        "marked.jsonl": "\ufeff" + "\n".join(map(json.dumps, rows)),
    }.items():
        found = tasks_in(write(tmp_path, name, text), input="prompt")
        assert [task["input"] for task in found] == [CHAT, "x"]
        assert found[0]["n"] == 2**63


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("t.csv", "", "there are no tasks in it"),
        ("t.csv", "input,answer\n", "there are no tasks in it"),
        ("t.csv", "input,answer\n1,2\n1,2,3\n", r"t\.csv:3 has 3 fields and the header 2"),
        ("t.csv", "input,answer\n1\n", r"t\.csv:2 has 1 fields"),
        ("t.csv", "input,answer,input\n1,2,3\n", "several columns 'input'"),
        ("t.csv", b"input\n\xff\xfe\n", r"t\.csv: .*utf-8"),
        ("t.csv", 'input\n"open', r"t\.csv:\d is not CSV: unexpected end of data"),
        ("t.csv", "question;answer\n1;2\n", r"has no 'input'.*it has 'question;answer'"),
        ("t.json", "", "there are no tasks in it"),
        ("t.json", "[]", "there are no tasks in it"),
        ("t.json", '[{"input": 1}', r"t\.json: Input data was truncated"),
        (
            "t.json",
            '{"data": [], "version": 1}',
            "not an array of objects but has 'data', 'version'",
        ),
        ("t.json", "3", "not an array of objects but has 3"),
        ("t.json", '[{"input": 1}, 2]', r"t\.json\[1\] is not a JSON object but int"),
        ("t.json", '[{"input": 1, "n": 99999999999999999999999}]', "integer of more than 64 bits"),
        ("t.json", '[{"input": null, "a": 1}]', r"t\.json\[0\] has no 'input'.*it has 'a'"),
        ("t.parquet", "", r"t\.parquet: .*0 bytes|pip install .*\[data\]'"),
        ("none.json", None, r"none.json: .*No such file"),
        (
            "t.json",
            '[{"input":1,"id":"a"},{"input":2,"id":"a"}]',
            r"json\[0\] and .*json\[1\] are two",
        ),
    ],
)
def test_broken_files(tmp_path: Path, name: str, text: str | None, message: str) -> None:
    if text is not None:
        write(tmp_path, name, text)
    with pytest.raises(ConfigError, match=message) as caught:
        tasks_in(tmp_path / name)
    assert str(caught.value).startswith("tasks.train")


def test_a_name_that_is_no_file_of_tasks(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"ends in \.jsonl, \.csv, \.json, \.parquet, or write"):
        load_tasks("rows.txt", tmp_path, key="tasks.train")


def test_a_column_that_is_not_there(tmp_path: Path) -> None:
    file = write(tmp_path, "t.csv", "question,answer\n1,2\n")
    with pytest.raises(ConfigError) as caught:
        tasks_in(file, input="qestion")
    place = tmp_path / "t.csv"
    assert "'qestion', which tasks.columns.input names; did you mean 'question'?" in str(
        caught.value
    )
    assert place.name in str(caught.value)


def test_a_task_given_twice_is_no_mistake(tmp_path: Path) -> None:
    rows = [{"input": 1, "id": "a"}, {"input": 1, "id": "a"}]
    assert tasks_in(write(tmp_path, "t.json", json.dumps(rows))) == rows


def test_the_id_of_a_task_that_changes_as_json(tmp_path: Path) -> None:
    write(tmp_path, "pairs_of.py", "rows = [{'id': 'ab', 'input': 1, 'entry': {'grid': (1, 2)}}]")
    with pytest.raises(ConfigError) as caught:
        load_tasks("pairs_of.py:rows", tmp_path, key="tasks.heldout")
    said = "tasks.heldout: pairs_of.py:rows[0] (id 'ab'): task['entry']['grid'] is of type tuple"
    assert str(caught.value).startswith(said)


def test_without_the_library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("pyarrow", "pyarrow.parquet", "datasets"):
        monkeypatch.setitem(sys.modules, name, None)
    for path in (write(tmp_path, "t.parquet", b"").name, "hf:a/b"):
        with pytest.raises(ConfigError, match=r"is missing: pip install .*\[data\]'"):
            load_tasks(path, tmp_path, key="tasks.train")


def test_parquet(parquet: Any) -> None:
    """As verl and TRL write it: chat messages, and a column for every row."""
    day, price = datetime.date(2026, 1, 2), decimal.Decimal("1.50")
    call = {"role": "assistant", "content": None, "name": "x"}
    rows = [
        {"prompt": CHAT, "reward_model": {"ground_truth": "4"}, "on": day, "price": price},
        {"prompt": [*CHAT, call], "reward_model": {"ground_truth": "5"}, "on": None},
    ]
    first, second = tasks_in(parquet(rows))
    assert first["input"] == CHAT
    assert first["reward_model"] == {"ground_truth": "4"}
    assert (first["on"], first["price"]) == ("2026-01-02", "1.50")
    assert second["input"] == [*CHAT, call]
    assert "on" not in second


def test_fields_that_a_table_adds_are_not_there(parquet: Any) -> None:
    """A struct of a table has the fields of all rows."""
    call = {"name": "add", "arguments": {"a": 1}}
    other = {"name": "look", "arguments": {"b": "x", "deep": [{"c": 1}, {"d": 2}]}}
    rows = [{"input": 1, "calls": [call]}, {"input": 2, "calls": [other]}]
    assert [task["calls"] for task in tasks_in(parquet(rows))] == [[call], [other]]


def test_parquet_of_datasets_with_json_inside(tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets", minversion="5.0", reason="pip install it")
    said = [[{"role": "user", "content": "Say hi"}], [{"role": "user", "content": [{"x": 1}]}]]
    rows = [
        {"prompt": one, "args": {"a": arg}} for one, arg in zip(said, ([1], {"b": 2}), strict=True)
    ]
    made = datasets.Dataset.from_list(rows, on_mixed_types="use_json")
    made.to_parquet(str(tmp_path / "d.parquet"))
    found = tasks_in(tmp_path / "d.parquet")
    assert [task["input"] for task in found] == said
    assert [task["args"] for task in found] == [{"a": [1]}, {"a": {"b": 2}}]
    ((_, first), _) = read_rows(str(tmp_path / "d.parquet"))  # as `agentrl data import`
    assert first == rows[0]


@pytest.mark.parametrize("lost", ["007", "42", "null", "true"])
def test_texts_whose_quotes_datasets_loses(lost: str, tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets", minversion="5.0", reason="pip install it")
    given = [{"input": "a", "answer": [{"deep": value}]} for value in (lost, ["x"])]
    made = datasets.Dataset.from_list(given, on_mixed_types="use_json")
    made.to_parquet(str(tmp_path / "d.parquet"))
    with pytest.raises(ConfigError, match=f"column 'answer' has values of several .*'{lost}'"):
        tasks_in(tmp_path / "d.parquet")


def test_null_in_json_is_a_value(tmp_path: Path) -> None:
    rows = [{"input": 1, "a": None}, {"input": None, "prompt": "x"}]
    one, other = tasks_in(write(tmp_path, "t.json", json.dumps(rows)))
    assert (one, other) == ({"input": 1, "a": None}, {"prompt": "x", "input": "x"})


def test_broken_parquet(parquet: Any) -> None:
    file = parquet([{"input": "a" * 1000, "id": 1}, {"input": "b", "id": 1}])
    with pytest.raises(ConfigError, match=r"t\.parquet\[0\] and t\.parquet\[1\] are two tasks"):
        tasks_in(file)
    with pytest.raises(ConfigError, match=r"t\.parquet\[0\] \(id 1\) has no column 'x'"):
        tasks_in(file, input="x")
    file.write_bytes(file.read_bytes()[:-50])
    with pytest.raises(ConfigError, match=r"t\.parquet: .*"):
        tasks_in(file)
    with pytest.raises(ConfigError, match="there are no tasks in it"):
        tasks_in(parquet([], __import__("pyarrow").schema([("input", "string")])))
    with pytest.raises(ConfigError, match=r"task\['score'\] is nan, which JSON does not have"):
        tasks_in(parquet([{"input": "a", "score": float("nan")}]))


def test_a_folder_of_a_data_set(tmp_path: Path) -> None:
    pytest.importorskip("datasets", reason="pip install 'agentrl[data]'")
    (tmp_path / "set").mkdir()
    write(tmp_path / "set", "train.jsonl", '{"question": "a"}\n{"question": "b"}\n')
    write(tmp_path / "set", "test.jsonl", '{"question": "c"}\n')
    for path, wanted in (("hf:set", ["a", "b"]), ("hf:set:test", ["c"])):
        found = load_tasks(path, tmp_path, key="tasks.train")
        assert [task["input"] for task in found] == wanted
    with pytest.raises(ConfigError, match=r"hf:set:none: .*none"):
        load_tasks("hf:set:none", tmp_path, key="tasks.train")


def test_a_folder_of_a_data_set_has_the_values_of_its_files(tmp_path: Path) -> None:
    pytest.importorskip("datasets", reason="pip install 'agentrl[data]'")
    values = ["007", "null", "2026-01-02", "[1]", 1e-12, 0.1 + 0.2, [1], {"a": "42"}, None, True]
    rows = [{"input": str(i), "when": "2026-01-02", "v": v} for i, v in enumerate(values)]
    for name, text in {
        "json": json.dumps(rows),
        "jsonl": "\n".join(map(json.dumps, rows)),
        "ndjson": "\n".join(map(json.dumps, rows)),
    }.items():
        (tmp_path / name).mkdir()
        write(tmp_path / name, f"train.{name}", text)
        assert load_tasks(f"hf:{name}", tmp_path, key="tasks.train") == rows
    (tmp_path / "csv" / "data").mkdir(parents=True)
    for split, code in (("train", "007"), ("test", "null")):
        write(tmp_path / "csv/data", f"{split}.csv", f"input,code\na,{code}\n")
    found = load_tasks("hf:csv:train+test", tmp_path, key="tasks.train")
    assert [task["code"] for task in found] == ["007", "null"]


def test_what_datasets_must_load_and_would_change(tmp_path: Path) -> None:
    """Options of the data set's own page, which only `datasets` knows."""
    pytest.importorskip("datasets", reason="pip install 'agentrl[data]'")
    page = "---\nconfigs:\n- config_name: default\n  data_files: rows.jsonl\n  field: null\n"
    page += "  encoding: latin-1\n---\n"
    for name in ("set", "other"):
        (tmp_path / name).mkdir()
        write(tmp_path / name, "README.md", page)
    write(tmp_path / "set", "rows.jsonl", b'{"input": "a", "when": "2026-01-02"}\n')
    with pytest.raises(ConfigError, match=r"column 'when' of hf:set is read .* as timestamp"):
        load_tasks("hf:set", tmp_path, key="tasks.train")
    write(tmp_path / "other", "rows.jsonl", '{"input": "\u00e9"}'.encode("latin-1"))
    assert load_tasks("hf:other", tmp_path, key="tasks.train") == [{"input": "\u00e9"}]


# -- rows that are written to a file and read again, whatever their values -------------------------


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
