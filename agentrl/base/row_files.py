"""Files of rows: JSONL, parquet and Hugging Face data sets are read, the first two are written."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec

from agentrl.errors import ConfigError

MARK = b"\xef\xbb\xbf"  # of UTF-8, which some programs write before the first line


def read_rows(source: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """The rows of "file.jsonl", "file.parquet" or "hf:owner/name[/config][@revision][:split]", each
    with its place.

    Raises ConfigError if it cannot be read."""
    path = Path(source)
    try:
        if source.startswith("hf:"):
            from datasets import load_dataset

            name, _, split = source.removeprefix("hf:").partition(":")
            name, _, revision = name.partition("@")
            parts = name.split("/")
            name, options = "/".join(parts[:2]), {"revision": revision or None}
            rows = load_dataset(name, *parts[2:], split=split or "train", **options)
            yield from ((f"{source}[{index}]", row) for index, row in enumerate(rows))
        elif path.suffix == ".parquet":
            from pyarrow import parquet

            batches = parquet.ParquetFile(path).iter_batches()
            listed = (row for batch in batches for row in batch.to_pylist())
            yield from ((f"{source}[{index}]", row) for index, row in enumerate(listed))
        else:
            with path.open("rb") as lines:
                yield from _lines(source, lines)
    except ImportError as error:
        raise ConfigError(
            f"{source}: {error.name} is missing: pip install 'agentrl[data]'"
        ) from None
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"{source} cannot be read as JSONL, parquet or hf:NAME: {error}"
        ) from None


def _lines(source: str, lines: Iterable[bytes]) -> Iterator[tuple[str, dict[str, Any]]]:
    reader = msgspec.json.Decoder(dict[str, Any])
    for number, line in enumerate(lines, start=1):
        text = line.removeprefix(MARK) if number == 1 else line
        if text.strip():
            try:
                row = reader.decode(text)
            except (ValueError, RecursionError) as error:
                raise ConfigError(f"{source}:{number} is not a JSON object: {error}") from None
            yield f"{source}:{number}", row


def write_rows(rows: Sequence[dict[str, Any]], path: Path) -> None:
    """Write rows as parquet or JSONL, depending on the file's suffix."""
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.suffix != ".parquet":
        path.write_bytes(b"".join(msgspec.json.encode(row) + b"\n" for row in rows))
        return
    try:
        import pyarrow as pa
        from pyarrow import parquet
    except ImportError as error:
        raise ConfigError(f"{error.name} is missing: pip install 'agentrl[data]'") from None
    parquet.write_table(pa.Table.from_pylist(list(rows)), path)
