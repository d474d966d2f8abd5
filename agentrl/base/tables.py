"""Rows in typed columns, without a change of any value: a column whose values would come back as
others has JSON texts, of the type `arrow.json`, as `datasets` writes it too.

A table has every column in every row, and every field in every struct: one that is null is not
there. A null that was written is one inside of JSON."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import msgspec

from agentrl.errors import ConfigError

if TYPE_CHECKING:
    import pyarrow as pa

JSON = "arrow.json"
HUGGING_FACE = b"huggingface"  # in the metadata of a schema that `datasets` has written
Row = dict[str, Any]
Read = Callable[[Any], Any]  # of a value as `to_pylist` gives it


def as_table(rows: Sequence[Row]) -> pa.Table:
    """A table with the columns of all rows. Raises ConfigError for a value that is no JSON."""
    import pyarrow as pa

    names = dict.fromkeys(name for row in rows for name in row)
    return pa.table({name: _column(name, rows) for name in names})


def plain_rows(batch: pa.RecordBatch | pa.Table, first: int = 0) -> Iterator[Row]:
    """The rows of a batch, whose first one has this number. Raises ConfigError for a text that is
    no JSON in a column of JSON."""
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
                        f"row {number} has a text in column {name!r} that is no JSON, though its"
                        f" type says so ({error}): the program that wrote the file lost its"
                        " quotes; write the column again"
                    ) from None
        yield row


def _column(name: str, rows: Sequence[Row]) -> pa.Array:
    import pyarrow as pa

    values = [row.get(name) for row in rows]
    written = any(value is None and name in row for value, row in zip(values, rows, strict=True))
    try:
        typed = pa.array(values)
        if not written and _is_storable(typed.type) and _is_same(typed, values):
            return typed
    except (pa.ArrowException, OverflowError, ValueError, TypeError):
        pass  # of several types, or of more than 64 bits
    texts = [msgspec.json.encode(row[name]).decode() if name in row else None for row in rows]
    return pa.ExtensionArray.from_storage(pa.json_(pa.string()), pa.array(texts, pa.string()))


def _is_same(column: pa.Array, values: Sequence[Any]) -> bool:
    """Whether the column is read as these values. Of arrow's own conversions, only that of
    integers to floats is equal to what it was given."""
    read = _reader(column.type)
    found: Iterable[Any] = column.to_pylist()
    return [x if x is None or read is None else read(x) for x in found] == list(values)


def _reader(kind: pa.DataType) -> Read | None:
    """What makes a value of this type the one that was written; None: it is."""
    import pyarrow as pa

    if getattr(kind, "extension_name", "") == JSON:
        return msgspec.json.decode
    if pa.types.is_struct(kind):
        fields = {field.name: _reader(field.type) for field in kind}
        return lambda value: _struct(value, fields)
    items = getattr(kind, "value_type", None)
    if items is None or pa.types.is_dictionary(kind) or (read := _reader(items)) is None:
        return None
    return lambda value: [one if one is None else read(one) for one in value]


def _struct(value: Row, fields: dict[str, Read | None]) -> Row:
    """The fields that are there; a chat message without content has null, as clients write it."""
    found = {}
    for name, one in value.items():
        read = fields[name]
        if one is not None:
            found[name] = one if read is None else read(one)
        elif name == "content" and "role" in fields:
            found[name] = None
    return found


def _check_quotes(batch: pa.RecordBatch | pa.Table) -> None:
    """Raise ConfigError where it cannot be known what was written: `datasets` writes both 7 and the
    text "7" as 7 in columns of JSON."""
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
