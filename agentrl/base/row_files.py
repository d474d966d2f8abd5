"""Files of rows: JSON lines, and what parts read."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Any

import msgspec

from agentrl.base.jsonvalues import NotJsonError, check_json
from agentrl.base.parts import installed_plugins, known, missing
from agentrl.base.tables import as_table
from agentrl.errors import ConfigError, install_command

LINES, PARQUET = ".jsonl", ".parquet"
LONGEST_CAUSE = 400  # characters of another library's message
MARK = b"\xef\xbb\xbf"  # of UTF-8, which some programs write before the first line


def is_row_file(source: str) -> bool:
    """Whether a name is that of a file of rows, rather than of an object."""
    return (kind := _kind(source)) == LINES or kind in known("row_files") or kind in _readers()


def suffixes() -> list[str]:
    """Of files of rows."""
    return [LINES, *sorted(kind for kind in _readers() if kind.startswith("."))]


def read_rows(source: str, root: Path = Path()) -> Iterator[tuple[str, dict[str, Any]]]:
    """The rows of a file of JSON lines, or of what a part or package reads, each with its place.
    root: the folder of files with relative names.

    Raises ConfigError if it cannot be read."""
    kind = _kind(source)
    try:
        if point := _readers().get(kind):
            yield from point.load()(source, root)
        elif why := missing("row_files", kind):
            raise ConfigError(f"{source}: {why}")
        else:
            with Path(root, source).open("rb") as lines:
                yield from read_lines(str(root / source), lines)
    except ImportError as error:
        raise ConfigError(f"{source}: {error.name} is missing: {install_command('data')}") from None
    except ConfigError:
        raise
    except Exception as error:  # noqa: BLE001 - the readers' libraries may raise anything
        why = " ".join(str(error).split())[:LONGEST_CAUSE] or type(error).__name__
        raise ConfigError(f"{source}: {why}") from None


def _kind(source: str) -> str:
    """The suffix of a file, or the scheme before a colon."""
    scheme, colon, _ = source.partition(":")
    if colon and scheme in _readers().keys() | known("row_files").keys():
        return scheme
    if colon and scheme in known("references"):
        return ""
    return Path(source).suffix.lower()


def _readers() -> dict[str, EntryPoint]:
    return {point.name: point for point in installed_plugins("row_files")}


def read_lines(source: str, lines: Iterable[bytes]) -> Iterator[tuple[str, dict[str, Any]]]:
    """The rows of JSON lines, each with its place."""
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
    """Write rows as JSON lines or as parquet, by the file's suffix; `read_rows` reads the same.

    Raises ConfigError for another suffix, and for a value that is no JSON, such as NaN."""
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
