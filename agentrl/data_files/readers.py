"""Readers of files whose rows are tasks or items; each yields (place, row). Names are relative to
`root`. They raise whatever their libraries do: `agentrl.base.row_files` makes sentences of it."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec

from agentrl.base.row_files import read_lines
from agentrl.errors import ConfigError

Rows = Iterator[tuple[str, dict[str, Any]]]
LARGEST_FIELD = 2**31 - 1  # characters; the default of 128 KiB refuses long documents


def read_parquet(source: str, root: Path = Path()) -> Rows:
    from pyarrow import parquet

    with parquet.ParquetFile(root / source) as file:
        if twice := _repeated(file.schema_arrow.names):
            raise ConfigError(f"{source} has several columns {twice!r}; rename one")
        count = 0
        for batch in file.iter_batches():
            for row in batch.to_pylist():
                yield f"{source}[{count}]", row
                count += 1


def read_hub(source: str, root: Path = Path()) -> Rows:
    """Read "hf:owner/name[/config][@revision][:split]", or a folder in the place of owner/name."""
    from datasets import load_dataset

    name, _, split = source.removeprefix("hf:").rpartition(":")
    if not name:
        name, split = split, "train"
    if (root / name).is_dir():
        rows = load_dataset(str(root / name), split=split)
    else:
        name, _, revision = name.partition("@")
        parts = name.split("/")
        options = {"revision": revision or None}
        rows = load_dataset("/".join(parts[:2]), *parts[2:], split=split, **options)
    yield from ((f"{source}[{index}]", row) for index, row in enumerate(rows))


def read_json(source: str, root: Path = Path()) -> Rows:
    """Read an array of objects. Many a `.json` on the hub has a JSON object on each line."""
    raw = Path(root, source).read_bytes().removeprefix(b"\xef\xbb\xbf").strip()
    if not raw:
        return
    try:
        found = msgspec.json.decode(raw)
    except msgspec.DecodeError:
        if not raw.startswith(b"{"):
            raise
        yield from read_lines(source, io.BytesIO(raw))
        return
    if not isinstance(found, list):
        what = f"{', '.join(map(repr, found))}"[:200] if isinstance(found, dict) else found
        raise ConfigError(
            f"{source} is not an array of objects but has {what}; write [{{...}}, {{...}}]"
        )
    for index, row in enumerate(found):
        if not isinstance(row, dict):
            raise ConfigError(f"{source}[{index}] is not a JSON object but {type(row).__name__}")
        yield f"{source}[{index}]", row


def read_csv(source: str, root: Path = Path()) -> Rows:
    """Read rows below a header. All values are text."""
    before = csv.field_size_limit(LARGEST_FIELD)
    try:
        with Path(root, source).open(encoding="utf-8-sig", newline="") as file:
            rows = csv.reader(file, strict=True)
            header = next(rows, [])
            if twice := _repeated(header):
                raise ConfigError(f"{source} has several columns {twice!r}; rename one")
            for row in rows:
                place = f"{source}:{rows.line_num}"
                if row and len(row) != len(header):
                    raise ConfigError(
                        f"{place} has {len(row)} fields and the header {len(header)}: quote fields"
                        ' with commas, as in "a, b"'
                    )
                if row:
                    yield place, dict(zip(header, row, strict=True))
    except csv.Error as error:
        raise ConfigError(f"{source}:{rows.line_num} is not CSV: {error}") from None
    finally:
        csv.field_size_limit(before)


def _repeated(names: list[str]) -> str | None:
    return next((name for name in names if names.count(name) > 1), None)
