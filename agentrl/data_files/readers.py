"""Readers of files whose rows are tasks or items; each yields (place, row). Names are relative to
`root`. They raise whatever their libraries do: `agentrl.base.row_files` makes sentences of it."""

from __future__ import annotations

import csv
import io
import logging
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path, PurePosixPath
from typing import Any

import msgspec

from agentrl.base.row_files import read_lines
from agentrl.base.tables import plain_rows
from agentrl.errors import ConfigError

log = logging.getLogger("agentrl.data")
Rows = Iterator[tuple[str, dict[str, Any]]]
BATCH = 1000  # rows that are converted at once
# Types that the loaders of `datasets` guess from texts, by loader.
GUESSED = {"json": ("Json", "timestamp"), "csv": ("timestamp",)}
LARGEST_FIELD = 2**31 - 1  # characters; the default of 128 KiB refuses long documents


def read_parquet(source: str, root: Path = Path()) -> Rows:
    from pyarrow import ArrowNotImplementedError, parquet

    try:
        opened = parquet.ParquetFile(root / source)
    except ArrowNotImplementedError as error:
        raise ConfigError(
            f"{_unreadable(source, root)} cannot be read ({error}): write it as text, or the rows"
            " as .jsonl"
        ) from None
    with opened as file:
        if twice := _repeated(file.schema_arrow.names):
            raise ConfigError(f"{source} has several columns {twice!r}; rename one")
        count = 0
        for batch in file.iter_batches():
            for row in plain_rows(batch, count):
                yield f"{source}[{count}]", row
                count += 1


def _unreadable(source: str, root: Path) -> str:
    """The column of a type that pyarrow does not have, such as whole numbers of more than 64 bits,
    which polars writes as 16 bytes that are of no type of Parquet's."""
    from pyarrow import ArrowNotImplementedError
    from pyarrow.parquet.core import ParquetReader

    reader = ParquetReader()
    with suppress(ArrowNotImplementedError):
        reader.open(root / source)
    schema, count = reader.metadata.schema, reader.metadata.num_columns  # read before it failed
    reader.close()
    leaves = [schema.column(number) for number in range(count)]
    untyped = [leaf for leaf in leaves if leaf.physical_type == "FIXED_LEN_BYTE_ARRAY"
               and str(leaf.logical_type) == "None"]  # fmt: skip
    found = dict.fromkeys(leaf.path if leaf.path == leaf.name else leaf.path.partition(".")[0]
                          for leaf in untyped or leaves)  # fmt: skip
    names = ", ".join(map(repr, found))
    return f"column {names} of {source}" if len(found) == 1 else f"{source}: one of {names}"


def read_json_lines(source: str, root: Path = Path()) -> Rows:
    with Path(root, source).open("rb") as lines:
        yield from read_lines(source, lines)


def read_hub(source: str, root: Path = Path()) -> Rows:
    """Read "hf:owner/name[/config][@revision][:split]", or a folder in the place of owner/name.

    `datasets` finds and fetches the files of the split, and this module reads them: its own readers
    of JSON and CSV change values (text that looks like a number or a date, small numbers). Files of
    other kinds, and those for which the data set names options, are loaded by it."""
    from datasets import load_dataset_builder

    name, _, split = source.removeprefix("hf:").rpartition(":")
    if not name:
        name, split = split, "train"
    if (root / name).is_dir():
        builder = load_dataset_builder(str(root / name))
    else:
        name, _, revision = name.partition("@")
        parts = name.split("/")
        builder = load_dataset_builder("/".join(parts[:2]), *parts[2:], revision=revision or None)
    files = _files_of(source, builder, split)
    rows = _loaded(source, builder, split) if files is None else _own(files)
    yield from ((f"{source}[{index}]", row) for index, row in enumerate(rows))


def _files_of(source: str, builder: Any, split: str) -> list[str] | None:
    """The addresses of a split's files, or None if this module cannot read them as they are
    meant. Raises ConfigError for a split that there is not."""
    files = builder.config.data_files or {}
    known = {str(key): [*map(str, paths)] for key, paths in files.items()}
    if not known or not {_suffix(path) for paths in known.values() for path in paths} <= {*FILES}:
        return None
    meant = {"name", "version", "data_dir", "data_files", "description", "features"}
    usual = type(builder.config)()
    if any(value != getattr(usual, key) for key, value in vars(builder.config).items()
           if key not in meant):  # fmt: skip
        return None
    wanted = [one.strip() for one in split.split("+")]
    if missing := [one for one in wanted if one not in known]:
        raise ConfigError(
            f"{source}: there is no split {missing[0]!r}; there is {', '.join(known)}"
        )
    return [path for one in wanted for path in known[one]]


def _own(files: list[str]) -> Iterator[dict[str, Any]]:
    from datasets import DownloadManager

    fetched = DownloadManager()
    for file in files:
        read = FILES[_suffix(file)]
        yield from (row for _, row in read(str(fetched.download(file))))


def _suffix(path: str) -> str:
    return PurePosixPath(path.partition("?")[0]).suffix.lower()


def _loaded(source: str, builder: Any, split: str) -> Iterator[dict[str, Any]]:
    """The rows as `datasets` loads them. Raises ConfigError for columns whose texts it changes."""
    builder.download_and_prepare()
    rows = builder.as_dataset(split=split)
    typed = GUESSED.get(builder.info.builder_name or "", ())
    columns = {name: str(feature) for name, feature in (rows.features or {}).items()}
    for name, feature in columns.items():
        if kind := next((kind for kind in typed if kind in feature), None):
            raise ConfigError(
                f"column {name!r} of {source} is read by `datasets` as {kind}, which changes the"
                " values that were written (007 becomes 7, a date grows a time): name the file"
                " itself in place of the data set, such as 'train.jsonl', or write it as parquet"
            )
    if builder.info.builder_name == "csv":
        guessed = [name for name, feature in columns.items() if "string" not in feature]
        if guessed:
            log.warning("%s: `datasets` reads the columns %s as numbers", source, guessed)
    table = rows.with_format("arrow")
    first = 0
    for batch in table.iter(BATCH):
        yield from plain_rows(batch, first)
        first += batch.num_rows


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


FILES = {
    ".csv": read_csv,
    ".json": read_json,
    ".jsonl": read_json_lines,
    ".ndjson": read_json_lines,
    ".parquet": read_parquet,
}
