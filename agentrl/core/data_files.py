"""Files of rows: JSON lines, JSON, CSV, parquet and data sets of the hub.

Rows are tasks or items of a data set.

Each reader yields pairs (place, row) of a file with a name relative to `root`, and raises its
library's errors; `read_rows` converts them to sentences.

Values survive typed columns unchanged: a column that would alter its values is written as JSON
texts of the type `arrow.json`, as `datasets` also does. In a table every row has every column and
every struct every field, so null means a missing one; an explicit null is written as JSON.
"""

from __future__ import annotations

import csv
import io
import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any

import msgspec

from agentrl.core.errors import ConfigError, install_command
from agentrl.core.values import NotJsonError, check_json

if TYPE_CHECKING:
    import pyarrow as pa


log = logging.getLogger("agentrl.data")
Rows = Iterator[tuple[str, dict[str, Any]]]
LINES, PARQUET = ".jsonl", ".parquet"
MAX_CAUSE_CHARS = 400  # characters shown of another library's message
BOM = b"\xef\xbb\xbf"  # byte order mark of UTF-8, which some programs write
BATCH = 1000  # rows that are converted at once
# Types that the loaders of `datasets` guess from texts, by loader.
GUESSED = {"json": ("Json", "timestamp"), "csv": ("timestamp",)}
MAX_FIELD_CHARS = 2**31 - 1  # characters; the default of 128 KiB refuses long documents


def is_row_file(source: str) -> bool:
    """Whether a name is that of a file of rows, rather than of an object."""
    return (kind := _kind(source)) == LINES or kind in READERS


def suffixes() -> list[str]:
    """Suffixes of files of rows."""
    return [LINES, *sorted(kind for kind in READERS if kind.startswith("."))]


def read_rows(source: str, root: Path = Path()) -> Rows:
    """The rows of a file or data set, each with its place. A file without one of `suffixes` has
    JSON lines. root: the folder of files with relative names.

    Raises ConfigError if it cannot be read."""
    try:
        if read := READERS.get(_kind(source)):
            yield from read(source, root)
        else:
            with Path(root, source).open("rb") as lines:
                yield from read_lines(str(root / source), lines)
    except ImportError as error:
        raise ConfigError(f"{source}: {error.name} is missing: {install_command('data')}") from None
    except ConfigError:
        raise
    except Exception as error:  # noqa: BLE001 - the readers' libraries may raise anything
        why = " ".join(str(error).split())[:MAX_CAUSE_CHARS] or type(error).__name__
        raise ConfigError(f"{source}: {why}") from None


def _kind(source: str) -> str:
    """The suffix of a file, or the scheme before a colon."""
    scheme, colon, _ = source.partition(":")
    return scheme if colon and scheme in READERS else Path(source).suffix.lower()


def read_lines(source: str, lines: Iterable[bytes]) -> Rows:
    """The rows of JSON lines, each with its place."""
    reader = msgspec.json.Decoder(dict[str, Any])
    for number, line in enumerate(lines, start=1):
        text = line.removeprefix(BOM) if number == 1 else line
        if text.strip():
            try:
                row = reader.decode(text)
            except (ValueError, RecursionError) as error:
                raise ConfigError(f"{source}:{number} is not a JSON object: {error}") from None
            yield f"{source}:{number}", row


def write_rows(rows: Sequence[dict[str, Any]], path: Path) -> None:
    """Write rows as JSON lines or as parquet, by the file's suffix; `read_rows` reads the same.

    Raises ConfigError for another suffix, and for a value that is not JSON, such as NaN."""
    if path.suffix not in (LINES, PARQUET):
        raise ConfigError(f"{path}: rows are written to a file that ends in {LINES} or {PARQUET}")
    for number, row in enumerate(rows):
        try:
            check_json(row)
        except NotJsonError as error:
            raise ConfigError(f"{path}: {error.at(f'row {number}')}") from None
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.suffix == LINES:
        path.write_bytes(b"".join(msgspec.json.encode(row) + b"\n" for row in rows))
        return
    try:
        from pyarrow import parquet
    except ImportError as error:
        raise ConfigError(f"{error.name} is missing: {install_command('data')}") from None
    parquet.write_table(as_table(rows), path)


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
    """The first column of a type that pyarrow does not have, such as integers of more than 64 bits,
    which polars writes as 16 bytes without a Parquet type."""
    from pyarrow import ArrowNotImplementedError
    from pyarrow.parquet.core import ParquetReader

    reader = ParquetReader()
    with suppress(ArrowNotImplementedError):
        reader.open(root / source)
    # Rows read before the error.
    schema, count = reader.metadata.schema, reader.metadata.num_columns
    reader.close()
    leaves = [schema.column(number) for number in range(count)]
    untyped = [leaf for leaf in leaves if leaf.physical_type == "FIXED_LEN_BYTE_ARRAY"
               and str(leaf.logical_type) == "None"]  # fmt: skip
    columns = dict.fromkeys(leaf.path if leaf.path == leaf.name else leaf.path.partition(".")[0]
                          for leaf in untyped or leaves)  # fmt: skip
    names = ", ".join(map(repr, columns))
    return f"column {names} of {source}" if len(columns) == 1 else f"{source}: one of {names}"


def read_json_lines(source: str, root: Path = Path()) -> Rows:
    with Path(root, source).open("rb") as lines:
        yield from read_lines(source, lines)


def read_hub(source: str, root: Path = Path()) -> Rows:
    """Read "hf:owner/name[/config][@revision][:split]", or a folder in the place of owner/name.

    `datasets` finds and fetches the files of the split, and this module reads them: its own readers
    of JSON and CSV change values (text that looks like a number or a date, small numbers). Files of
    other formats, and files for which the data set sets options, are loaded by `datasets`."""
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
    rows = _loaded(source, builder, split) if files is None else _read(files)
    yield from ((f"{source}[{index}]", row) for index, row in enumerate(rows))


def _files_of(source: str, builder: Any, split: str) -> list[str] | None:
    """The addresses of a split's files, or None if this module cannot read them as the
    data set intends. Raises ConfigError for an unknown split."""
    files = builder.config.data_files or {}
    splits = {str(key): [*map(str, paths)] for key, paths in files.items()}
    if not splits or not {_suffix(path) for paths in splits.values() for path in paths} <= {*FILES}:
        return None
    handled = {"name", "version", "data_dir", "data_files", "description", "features"}
    defaults = type(builder.config)()
    if any(value != getattr(defaults, key) for key, value in vars(builder.config).items()
           if key not in handled):  # fmt: skip
        return None
    names = [name.strip() for name in split.split("+")]
    if missing := [name for name in names if name not in splits]:
        raise ConfigError(
            f"{source}: there is no split {missing[0]!r}; there is {', '.join(splits)}"
        )
    return [path for name in names for path in splits[name]]


def _read(files: list[str]) -> Iterator[dict[str, Any]]:
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
    """Read an array of objects. Many `.json` files of the hub are JSON lines."""
    raw = Path(root, source).read_bytes().removeprefix(BOM).strip()
    if not raw:
        return
    try:
        data = msgspec.json.decode(raw)
    except msgspec.DecodeError:
        if not raw.startswith(b"{"):
            raise
        yield from read_lines(source, io.BytesIO(raw))
        return
    if not isinstance(data, list):
        content = f"{', '.join(map(repr, data))}"[:200] if isinstance(data, dict) else data
        raise ConfigError(
            f"{source} is not an array of objects but has {content}; write [{{...}}, {{...}}]"
        )
    for index, row in enumerate(data):
        if not isinstance(row, dict):
            raise ConfigError(f"{source}[{index}] is not a JSON object but {type(row).__name__}")
        yield f"{source}[{index}]", row


def read_csv(source: str, root: Path = Path()) -> Rows:
    with Path(root, source).open(encoding="utf-8-sig", newline="") as file:
        yield from csv_rows(source, file)


def csv_rows(source: str, file: Iterable[str]) -> Rows:
    """The rows of CSV below its header, each with its place. All values are text."""
    before = csv.field_size_limit(MAX_FIELD_CHARS)
    rows = csv.reader(file, strict=True)
    try:
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


READERS = {".csv": read_csv, ".json": read_json, ".parquet": read_parquet, "hf": read_hub}
# Files of data sets of the hub that are read as they are, by suffix.
FILES = {
    ".csv": read_csv,
    ".json": read_json,
    ".jsonl": read_json_lines,
    ".ndjson": read_json_lines,
    ".parquet": read_parquet,
}


JSON = "arrow.json"
HUGGING_FACE = b"huggingface"  # in the metadata of a schema that `datasets` has written
Row = dict[str, Any]
Read = Callable[[Any], Any]  # converts a value of `to_pylist`


def as_table(rows: Sequence[Row]) -> pa.Table:
    """A table with the columns of all rows. Raises ConfigError for a value that is not JSON."""
    import pyarrow as pa

    names = dict.fromkeys(name for row in rows for name in row)
    return pa.table({name: _column(name, rows) for name in names})


def plain_rows(batch: pa.RecordBatch | pa.Table, first: int = 0) -> Iterator[Row]:
    """The rows of a batch; `first` is the number of its first row. Raises ConfigError for invalid
    JSON in a column of JSON."""
    names = batch.schema.names
    if HUGGING_FACE in (batch.schema.metadata or {}):
        _check_quotes(batch)
    reads = [_reader(field.type) for field in batch.schema]
    columns = [column.to_pylist() for column in batch.columns]
    for number, values in enumerate(zip(*columns, strict=True), first):
        row = {}
        for name, read, value in zip(names, reads, values, strict=True):
            if value is not None:
                try:
                    row[name] = value if read is None else read(value)
                except msgspec.DecodeError as error:
                    raise ConfigError(
                        f"row {number} has a text in column {name!r} that is not JSON, though its"
                        f" type says so ({error}): the program that wrote the file lost its"
                        " quotes; write the column again"
                    ) from None
        yield row


def _column(name: str, rows: Sequence[Row]) -> pa.Array:
    import pyarrow as pa

    values = [row.get(name) for row in rows]
    has_null = any(value is None and name in row for value, row in zip(values, rows, strict=True))
    try:
        typed = pa.array(values)
        if not has_null and _is_storable(typed.type) and _is_same(typed, values):
            return typed
    except (pa.ArrowException, OverflowError, ValueError, TypeError):
        pass  # values of several types, or integers of more than 64 bits
    texts = [msgspec.json.encode(row[name]).decode() if name in row else None for row in rows]
    return pa.ExtensionArray.from_storage(pa.json_(pa.string()), pa.array(texts, pa.string()))


def _is_same(column: pa.Array, values: Sequence[Any]) -> bool:
    """Whether reading the column returns these values. Of arrow's conversions only integers to
    floats keep values equal."""
    read = _reader(column.type)
    stored: Iterable[Any] = column.to_pylist()
    return [value if value is None or read is None else read(value) for value in stored] == list(
        values
    )


def _reader(kind: pa.DataType) -> Read | None:
    """A function that converts a value of this type back to the one that was written; None: not
    needed."""
    import pyarrow as pa

    if getattr(kind, "extension_name", "") == JSON:
        return msgspec.json.decode
    if pa.types.is_struct(kind):
        fields = {field.name: _reader(field.type) for field in kind}
        return lambda value: _struct(value, fields)
    if pa.types.is_map(kind) and _is_text(kind.key_type):
        item = _reader(kind.item_type)
        return lambda value: {key: x if x is None or item is None else item(x) for key, x in value}
    items = getattr(kind, "value_type", None)
    if items is None or pa.types.is_dictionary(kind) or (read := _reader(items)) is None:
        return None
    return lambda value: [x if x is None else read(x) for x in value]


def _is_text(kind: pa.DataType) -> bool:
    import pyarrow as pa

    return bool(pa.types.is_string(kind) or pa.types.is_large_string(kind))


def _struct(value: Row, fields: dict[str, Read | None]) -> Row:
    """The fields that are not null; a chat message keeps null as its content, as clients write
    it."""
    fields_present = {}
    for name, item in value.items():
        read = fields[name]
        if item is not None:
            fields_present[name] = item if read is None else read(item)
        elif name == "content" and "role" in fields:
            fields_present[name] = None
    return fields_present


def _check_quotes(batch: pa.RecordBatch | pa.Table) -> None:
    """Raise ConfigError where the written value is ambiguous: `datasets` writes both 7 and the text
    "7" as 7 in columns of JSON."""
    for name, column in zip(batch.schema.names, batch.columns, strict=True):
        for text in _json_texts(column):
            if not text.startswith(('"', "[", "{")):
                raise ConfigError(
                    f"column {name!r} has values of several types, and {text!r:.40} among them may"
                    " be a text or not: `datasets` writes texts that look like numbers, true or"
                    " null without their quotes; write the rows as .jsonl, or the column as text"
                    " (json.dumps)"
                )


def _json_texts(column: Any) -> Iterator[str]:
    """The texts of all JSON in a column, at any depth."""
    import pyarrow as pa

    kind = column.type
    if getattr(kind, "extension_name", "") == JSON:
        yield from (text for text in column.to_pylist() if text is not None)
    elif pa.types.is_struct(kind):
        chunks = column.chunks if isinstance(column, pa.ChunkedArray) else [column]
        for field in (field for chunk in chunks for field in chunk.flatten()):
            yield from _json_texts(field)
    elif pa.types.is_list(kind) or pa.types.is_large_list(kind):
        chunks = column.chunks if isinstance(column, pa.ChunkedArray) else [column]
        for chunk in chunks:
            yield from _json_texts(chunk.flatten())


def _is_storable(kind: pa.DataType) -> bool:
    """Whether parquet has the type: a struct needs a field."""
    import pyarrow as pa

    if pa.types.is_struct(kind):
        return kind.num_fields > 0 and all(_is_storable(field.type) for field in kind)
    items = getattr(kind, "value_type", None)
    return items is None or _is_storable(items)
