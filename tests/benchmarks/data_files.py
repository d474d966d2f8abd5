"""Rows of tasks and data sets through every reader and writer: does any value change?

`python -m tests.benchmarks.data_files --json [--rows 300]`, in an interpreter that has pyarrow,
pandas, polars and datasets. Each of the rows holds what tasks and data sets hold: text that looks
like a number, a date, null or JSON; messages with mixed contents; nested arguments of tools; tiny
and huge numbers; missing and extra fields. Each way writes all of them to files, which the product
reads.

A row of a way is `equal`, `refused` (an error with the column's name), `writer` (the file itself
holds another value: what the library that wrote it lost, read without the product) or `changed`.
Of a table's typed columns a null is no field, and a whole number among floats is a float."""

from __future__ import annotations

import argparse
import csv
import json
import logging
import os
import random
import tempfile
from collections import Counter
from collections.abc import Callable, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

from agentrl.core.data_files import read_rows, write_rows
from agentrl.core.errors import ConfigError
from agentrl.core.loading import load_tasks

Row = dict[str, Any]
TEXTS = ["007", "42", "-1", "1e5", "0x10", "1_000", "2026-01-02", "2026-01-02T03:04:05Z", "12:30",
         "null", "None", "NaN", "true", "", " ", "[1]", "{}", '{"a": 1}', '"quoted"', "Say hi",
         "a,b", "a\nb", "\\", "\u00e9\u4e2d\U0001f600", "inf", "-0", "0.10"]  # fmt: skip
NUMBERS = [0, 1, -1, 7, 2**53, 2**53 + 1, 2**63 - 1, -(2**63), 2**64 - 1, 1e-12, 5e-324, 1e300,
           0.1 + 0.2, -0.5, 1e-7, 123456.789]  # fmt: skip
VALUES: list[Any] = [*TEXTS, *NUMBERS, True, False, None, [], {}, [1, "a", None], [[1, 2], [3]]]


def made(count: int, seed: int = 0) -> list[Row]:
    """Rows of tasks: chats, scores, arguments, and fields of any type."""
    draw = random.Random(seed)
    return [_row(draw, index) for index in range(count)]


def _row(draw: random.Random, index: int) -> Row:
    row: Row = {"id": f"{index:04}", "input": draw.choice(TEXTS) or "x", "any": draw.choice(VALUES)}
    row["text"], row["score"] = draw.choice(TEXTS), draw.choice([0.5, 1e-12, 1e300, 0.1 + 0.2])
    row["count"] = draw.choice([0, 1, -7, 2**62])
    row["arguments"] = {draw.choice("abc"): draw.choice(VALUES) for _ in range(draw.randint(0, 3))}
    row["messages"] = _talk(draw)
    if draw.random() < 0.4:
        row[f"extra_{draw.randint(0, 3)}"] = draw.choice(VALUES)
    if draw.random() < 0.2:
        del row[draw.choice(["any", "text", "score", "arguments"])]
    return row


def _talk(draw: random.Random) -> list[Row]:
    parts = [{"type": "text", "text": draw.choice(TEXTS)}]
    told = {"role": "user", "content": draw.choice([draw.choice(TEXTS), parts])}
    given = {draw.choice("xyz"): draw.choice(VALUES) for _ in range(2)}
    function: Row = {"name": "look", "arguments": draw.choice([given, json.dumps(given)])}
    call = {"id": "c", "type": "function", "function": function}
    asked = {"role": "assistant", "content": None, "tool_calls": [call]}
    return [told] if draw.random() < 0.5 else [told, asked]


def flat(rows: Sequence[Row]) -> list[Row]:
    """Rows of text only, which CSV can hold."""
    columns = ("id", "input", "text", "count", "score")
    return [{key: str(row.get(key, "")) for key in columns} for row in rows]


# -- ways: each writes a file of these rows, and the source that the product reads -----------------


def json_lines(rows: Sequence[Row], folder: Path) -> str:
    (folder / "t.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return "t.jsonl"


def json_array(rows: Sequence[Row], folder: Path) -> str:
    (folder / "t.json").write_text(json.dumps(rows, indent=1))
    return "t.json"


def own_lines(rows: Sequence[Row], folder: Path) -> str:
    write_rows(rows, folder / "own.jsonl")
    return "own.jsonl"


def own_parquet(rows: Sequence[Row], folder: Path) -> str:
    write_rows(rows, folder / "own.parquet")
    return "own.parquet"


def by_csv(rows: Sequence[Row], folder: Path) -> str:
    with (folder / "t.csv").open("w", newline="") as file:
        out = csv.DictWriter(file, [*rows[0]])
        out.writeheader()
        out.writerows(rows)
    return "t.csv"


def by_pandas_csv(rows: Sequence[Row], folder: Path) -> str:
    import_module("pandas").DataFrame(rows).to_csv(folder / "p.csv", index=False)
    return "p.csv"


def by_polars_csv(rows: Sequence[Row], folder: Path) -> str:
    import_module("polars").DataFrame(rows).write_csv(folder / "q.csv")
    return "q.csv"


def by_pyarrow(rows: Sequence[Row], folder: Path) -> str:
    arrow, names = import_module("pyarrow"), dict.fromkeys(key for row in rows for key in row)
    table = arrow.table({name: [row.get(name) for row in rows] for name in names})
    import_module("pyarrow.parquet").write_table(table, folder / "t.parquet")
    return "t.parquet"


def by_pandas(rows: Sequence[Row], folder: Path) -> str:
    import_module("pandas").DataFrame(rows).to_parquet(folder / "p.parquet")
    return "p.parquet"


def by_polars(rows: Sequence[Row], folder: Path) -> str:
    frame = import_module("polars").DataFrame(rows, infer_schema_length=None)
    frame.write_parquet(folder / "q.parquet")
    return "q.parquet"


def by_datasets(rows: Sequence[Row], folder: Path) -> str:
    made = import_module("datasets").Dataset.from_list(list(rows), on_mixed_types="use_json")
    made.to_parquet(str(folder / "d.parquet"))
    return "d.parquet"


def by_datasets_lines(rows: Sequence[Row], folder: Path) -> str:
    """A data set of JSON lines that `datasets` loads and writes as parquet."""
    json_lines(rows, folder)
    given: Any = {"data_files": str(folder / "t.jsonl"), "split": "train"}
    loaded = import_module("datasets").load_dataset("json", **given)
    loaded.to_parquet(str(folder / "l.parquet"))
    return "l.parquet"


def hub(write: Callable[[Sequence[Row], Path], str]) -> Callable[[Sequence[Row], Path], str]:
    def folder_of(rows: Sequence[Row], folder: Path) -> str:
        (folder / "set").mkdir(exist_ok=True)
        for old in (folder / "set").iterdir():
            old.unlink()
        name = write(rows, folder / "set")
        (folder / "set" / name).rename(folder / "set" / f"train{Path(name).suffix}")
        return "hf:set"

    return folder_of


WAYS: dict[str, Callable[[Sequence[Row], Path], str]] = {
    ".jsonl": json_lines,
    ".json": json_array,
    ".jsonl own": own_lines,
    ".parquet own": own_parquet,
    ".parquet pyarrow": by_pyarrow,
    ".parquet pandas": by_pandas,
    ".parquet polars": by_polars,
    ".parquet datasets": by_datasets,
    ".parquet datasets of .jsonl": by_datasets_lines,
    "hf: .jsonl": hub(json_lines),
    "hf: .json": hub(json_array),
    "hf: .parquet": hub(by_datasets),
    ".csv": by_csv,
    ".csv pandas": by_pandas_csv,
    ".csv polars": by_polars_csv,
    "hf: .csv": hub(by_csv),
}


# -- what became of each row -----------------------------------------------------------------------


def outcomes(way: str, rows: Sequence[Row], folder: Path, chunk: int = 1) -> Counter[str]:
    """How many rows came back equal, refused, changed by the writer, or changed. chunk: rows in a
    file."""
    rows = flat(rows) if ".csv" in way else rows
    found: Counter[str] = Counter()
    for first in range(0, len(rows), chunk):
        with tempfile.TemporaryDirectory(dir=folder) as own:
            found.update(_outcomes(way, rows[first : first + chunk], Path(own)))
    return found


def _outcomes(way: str, rows: Sequence[Row], folder: Path) -> list[str]:
    try:
        source = WAYS[way](rows, folder)
    except Exception:  # noqa: BLE001 - the writer's own error is no change
        return ["refused by the writer"] * len(rows)
    try:
        tasks = load_tasks(source, folder, key="tasks.train")
        items = [row for _, row in read_rows(source, folder)]
    except ConfigError as error:
        named = any(f"'{name}'" in str(error) for row in rows for name in row)
        if not named:
            print(way, error)
        return ["refused" if named else "unnamed"] * len(rows)
    table = ".parquet" in way
    held = [*_held(folder, source)] if table else rows
    ends = []
    for row, task, item, own in zip(rows, tasks, items, held, strict=True):
        if is_same(row, task, table) and is_same(row, item, table):
            ends.append("equal")
        else:
            ends.append("changed" if is_same(row, own, table) else "writer")
            if ends[-1] == "changed":
                print(way, row, task, item, sep="\n  ")
    return ends


def is_same(row: Any, found: Any, table: bool) -> bool:
    """Whether two values are equal, and of the same types but for numbers. table: a null of a row
    or struct is no field."""
    if isinstance(row, dict) and isinstance(found, dict):
        one, other = ({k: v for k, v in x.items() if not table or v is not None}
                      for x in (row, found))  # fmt: skip
        return one.keys() == other.keys() and all(is_same(one[k], other[k], table) for k in one)
    if isinstance(row, list) and isinstance(found, list):
        pairs = len(row) == len(found)
        return pairs and all(is_same(a, b, table) for a, b in zip(row, found, strict=True))
    return bool(row == found) and isinstance(row, bool) == isinstance(found, bool)


def _held(folder: Path, source: str) -> list[Row]:
    """What a parquet file holds, read without the product."""
    file = folder / ("set/train.parquet" if source.startswith("hf:") else source)
    table = import_module("pyarrow.parquet").read_table(file)

    def value(given: Any, kind: Any) -> Any:
        if given is None:
            return None
        if str(kind) == "extension<arrow.json>":
            try:
                return json.loads(given)
            except ValueError:
                return object()
        if str(kind).startswith("struct"):
            return {field.name: value(given[field.name], field.type) for field in kind}
        if "list" in str(kind).partition("<")[0]:
            return [value(one, kind.value_type) for one in given]
        return given

    return [{f.name: value(row[f.name], f.type) for f in table.schema} for row in table.to_pylist()]


def measure(count: int) -> dict[str, Any]:
    found: dict[str, Any] = {"rows": count, "changed": 0, "unnamed": 0}
    with tempfile.TemporaryDirectory() as name:
        for way in WAYS:
            both: Counter[str] = Counter()
            for chunk in (1, 3, count):
                # `datasets` takes a tenth of a second for each folder.
                few = count if chunk > 1 or not way.startswith(("hf", ".parquet datasets")) else 60
                rows = made(few) if chunk != 3 else made(min(few, 90), seed=1)
                both += outcomes(way, rows, Path(name), chunk)
            found[way] = dict(both)
            found["changed"] += both["changed"]
            found["unnamed"] += both["unnamed"]
    return found


def main() -> None:
    options = argparse.ArgumentParser()
    options.add_argument("--json", action="store_true")
    options.add_argument("--rows", type=int, default=300)
    given = options.parse_args()
    os.environ["HF_HUB_OFFLINE"] = "1"
    logging.disable(logging.WARNING)
    import_module("datasets").disable_progress_bars()
    found = measure(given.rows)
    print(json.dumps(found) if given.json else "\n".join(f"{k}: {v}" for k, v in found.items()))


if __name__ == "__main__":
    main()
