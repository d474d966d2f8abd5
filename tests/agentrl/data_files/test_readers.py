"""Tasks from files of other projects, and the sentences about files that have none."""

from __future__ import annotations

import datetime
import decimal
import json
import sys
from pathlib import Path
from typing import Any

import pytest

from agentrl.base.loading import load_tasks
from agentrl.errors import ConfigError

CHAT = [{"role": "user", "content": "2+2?"}]


def tasks_in(file: Path, **columns: str) -> list[dict[str, Any]]:
    return load_tasks(file.name, file.parent, key="tasks.train", columns=columns)


def write(folder: Path, name: str, text: str | bytes) -> Path:
    (folder / name).write_bytes(text if isinstance(text, bytes) else text.encode())
    return folder / name


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
