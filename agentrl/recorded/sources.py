"""Reads files of recorded traces row by row, and yields the nodes of their traces. No content of a
file stops the import: unreadable parts are reported, and the rest is read. Memory does not grow
with the files: spans, which come in any order and are spread over files, are collected in a
temporary database.
"""

from __future__ import annotations

import gzip
import json
import sqlite3
import tempfile
import zlib
from collections.abc import Iterable, Iterator
from itertools import chain, islice
from pathlib import Path
from typing import IO, Any

import msgspec

from agentrl.core.data_files import BOM, csv_rows, read_rows
from agentrl.core.errors import ConfigError, Invalid
from agentrl.core.otlp import requests_of
from agentrl.recorded.formats import format_of, transcripts, unwrapped
from agentrl.recorded.nodes import Issues, Node, Note, storable

PROTOBUF = (".pb", ".binpb")
SUFFIXES = (".json", ".jsonl", ".ndjson", ".csv", ".parquet", *PROTOBUF, ".db")
PEEKED = 20  # rows of a file that are read to recognise its format
CHUNK = 2**20  # characters per read
MAX_VALUE_CHARS = 2**28  # characters of one value of a file
MAX_LITERAL_CHARS = 16  # characters of an escape, a word such as -Infinity
WAITING = 2000  # nodes per write to the temporary database
Trace = list[Node | Note]


def files_of(source: Path) -> list[Path]:
    """The files of a folder that may have traces, or the file itself. Raises ConfigError if there
    are none."""
    if source.is_file():
        return [source]
    files = [path for path in sorted(source.rglob("*")) if path.is_file() and _may_have(path)]
    if not files:
        kinds = ", ".join(SUFFIXES)
        raise ConfigError(f"{source} is no file, and no folder with files of {kinds} (or .gz)")
    return files


def _may_have(path: Path) -> bool:
    """Whether a file of a folder may have traces. The only database format is OpenCode's: the store
    of an earlier import may be beside its sources."""
    kind = kind_of(path)
    return kind in SUFFIXES and (kind != ".db" or path.name.startswith("opencode"))


def _left_out(source: Path) -> Iterator[Path]:
    for path in sorted(source.rglob("*")):
        database = kind_of(path).startswith(".db")  # such as the store of the import
        if path.is_file() and not (_may_have(path) or database or path.name.startswith(".")):
            yield path


def kind_of(path: Path) -> str:
    """The suffix of a file in lower case, without a suffix of compression."""
    return Path(path.name.removesuffix(".gz")).suffix.lower()


def traces_of(source: Path, issues: Issues, counts: dict[str, int]) -> Iterator[Trace]:
    """The traces of a file or folder, each with all its nodes and notes. counts: rows by format,
    updated in place. Notes on traces of other files are yielded as traces with only notes."""
    for path in _left_out(source):
        issues.add("a file of a kind that is not read is left out", path.name)
    with tempfile.TemporaryDirectory() as folder, Waiting(Path(folder, "spans.db")) as waiting:
        for path in files_of(source):
            for trace in _traces_in(path, issues, counts, waiting):
                if any(isinstance(item, Node) for item in trace):
                    yield trace
                else:
                    issues.add("a conversation has no answer of a model and is left out", path.name)
        yield from waiting.traces()


def _traces_in(
    path: Path, issues: Issues, counts: dict[str, int], waiting: Waiting
) -> Iterator[Trace]:
    try:
        if kind_of(path) == ".db":
            yield from _of_lines(
                path, "opencode", transcripts.read_opencode_database(path, issues), issues, counts
            )
            return
        rows = rows_of(path, issues)
        first = list(islice(rows, PEEKED))
        for form in map(format_of, first):
            if form and form.lines:
                traces = form.lines(chain(first, rows), issues)
                yield from _of_lines(path, form.name, traces, issues, counts)
                return
        yield from _by_row(path, chain(first, rows), issues, counts, waiting)
    except (ConfigError, Invalid, OSError, EOFError, zlib.error) as error:
        issues.add("a file cannot be read", f"{path.name}: {error}")


# Exceptions that a reader raises for a value of an unexpected type.
MALFORMED = (TypeError, ValueError, KeyError, AttributeError, IndexError, RecursionError)


def _of_lines(
    path: Path, name: str, traces: Iterator[Trace], issues: Issues, counts: dict[str, int]
) -> Iterator[Trace]:
    try:
        for trace in traces:
            counts[name] = counts.get(name, 0) + 1
            yield trace
    except MALFORMED as error:
        issues.add(
            f"a file of {name} does not follow its format from some point on; what comes before"
            " is read",
            f"{path.name}: {type(error).__name__}: {error}",
        )


def _by_row(
    path: Path, rows: Iterable[Any], issues: Issues, counts: dict[str, int], waiting: Waiting
) -> Iterator[Trace]:
    for row in chain.from_iterable(unwrapped(row) or [row] for row in rows):
        form = format_of(row)
        if form is None:
            keys = ", ".join([*row][:6]) if isinstance(row, dict) else type(row).__name__
            issues.add("a row is of no known format and is left out", f"{path.name}: {keys}")
            continue
        counts[form.name] = counts.get(form.name, 0) + 1
        try:
            if form.whole:
                yield from form.whole(row, issues)
            elif form.spans:
                waiting.add(form.spans(row, issues))
            else:
                issues.add(
                    f"a line of {form.name} is not in a transcript and is left out", path.name
                )
        except MALFORMED as error:
            issues.add(
                f"a row of {form.name} does not follow its format and is left out",
                f"{path.name}: {type(error).__name__}: {error}",
            )


def rows_of(path: Path, issues: Issues) -> Iterator[Any]:
    """The values of a file: lines of JSON, values and arrays of JSON, rows of parquet or CSV, or
    requests of OTLP in protobuf."""
    kind = kind_of(path)
    opened: Any = gzip.open if path.suffix == ".gz" else open
    if kind == ".parquet":
        yield from (row for _, row in read_rows(str(path.resolve())))
    elif kind == ".csv":
        with opened(path, "rt", encoding="utf-8-sig", errors="replace", newline="") as file:
            for _, row in csv_rows(path.name, file):
                yield {key: value for key, value in row.items() if value}  # CSV has no null
    elif kind in PROTOBUF:
        with opened(path, "rb") as file:
            yield from requests_of(file)
    elif kind in (".jsonl", ".ndjson"):
        with opened(path, "rb") as file:
            yield from _lines(path, file, issues)
    else:
        with opened(path, "rt", encoding="utf-8-sig", errors="replace") as file:
            yield from _values(path, file, issues)


def _lines(path: Path, file: IO[bytes], issues: Issues) -> Iterator[Any]:
    for number, line in enumerate(file, start=1):
        text = line.removeprefix(BOM) if number == 1 else line
        if not text.strip():
            continue
        try:
            yield msgspec.json.decode(text)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            try:  # such as NaN, and halves of surrogate pairs
                yield _loads(text.decode("utf-8", "replace"))
            except (ValueError, RecursionError) as error:
                issues.add(
                    "a line is no JSON, such as one that was cut off, and is left out",
                    f"{path.name}:{number}: {error}",
                )


def _loads(text: str) -> Any:
    value = json.loads(text, parse_constant=lambda _: None)
    return json.loads(json.dumps(value, ensure_ascii=False).encode("utf-8", "replace"))


def _values(path: Path, file: IO[str], issues: Issues) -> Iterator[Any]:
    """The values of a JSON file, one after another. The elements of a top-level array are yielded
    singly, so that it need not fit into memory."""
    decoder = json.JSONDecoder(parse_constant=lambda _: None)
    text, at, ended, step, inside = "", 0, False, CHUNK, False
    while True:
        while at < len(text) and (text[at].isspace() or (inside and text[at] == ",")):
            at += 1
        if at < len(text) and text[at] == "[" and not inside:
            inside, at = True, at + 1
            continue
        if at < len(text) and inside and text[at] == "]":
            inside, at = False, at + 1
            continue
        if at < len(text):
            try:
                value, end = decoder.raw_decode(text, at)
                if end < len(text) or ended or text[at] in '{["':
                    surrogates = text.find("\\ud", at, end) >= 0 or text.find("\\uD", at, end) >= 0
                    yield _loads(text[at:end]) if surrogates else value
                    at, step = end, CHUNK
                    continue
            except (ValueError, RecursionError) as error:
                if ended or len(text) - at > MAX_VALUE_CHARS or not _is_cut_off(error, text):
                    issues.add(
                        "a file is truncated or not JSON from some point on; what comes before"
                        " is read",
                        f"{path.name}: {error}",
                    )
                    return
        if ended:
            if inside:
                issues.add(
                    "a file is truncated or not JSON from some point on; what comes before is read",
                    f"{path.name}: its array does not end",
                )
            return
        more = file.read(step)
        text, at, ended, step = text[at:] + more, 0, not more, step * 2


def _is_cut_off(error: Exception, text: str) -> bool:
    """Whether more text may complete a value that could not be read."""
    if not isinstance(error, json.JSONDecodeError):
        return False
    return error.msg.startswith("Unterminated") or error.pos > len(text) - MAX_LITERAL_CHARS


class Waiting:
    """The spans that have been read, in a temporary database."""

    def __init__(self, path: Path) -> None:
        self._database = sqlite3.connect(path)
        self._database.execute("pragma synchronous = off")
        self._database.execute("pragma journal_mode = off")
        self._database.execute("pragma cache_size = -32000")
        self._database.execute("create table item (trace text, node text, note int, body blob)")
        self._rows: list[tuple[str, str, int, bytes]] = []
        self._encoder = msgspec.msgpack.Encoder()

    def __enter__(self) -> Waiting:
        return self

    def __exit__(self, *_: object) -> None:
        self._database.close()

    def add(self, items: Iterable[Node | Note]) -> None:
        """Keep nodes and notes until all files have been read."""
        for item in items:
            node = item.id if isinstance(item, Node) else item.node
            self._rows.append((item.trace, node, int(isinstance(item, Note)), self._encoded(item)))
        if len(self._rows) >= WAITING:
            self._write()

    def _encoded(self, item: Node | Note) -> bytes:
        try:
            return self._encoder.encode(item)
        except OverflowError:  # an integer of more than 64 bits
            return self._encoder.encode(storable(msgspec.to_builtins(item)))

    def _write(self) -> None:
        self._database.executemany("insert into item values (?, ?, ?, ?)", self._rows)
        self._rows = []

    def traces(self) -> Iterator[Trace]:
        """Each trace with its nodes and notes, in the order in which they were read."""
        self._write()
        self._database.execute("create index by_node on item (node) where note = 0")
        self._database.execute(
            "update item set trace = coalesce((select n.trace from item n where n.node = item.node"
            " and n.note = 0), '') where note = 1 and trace = ''"
        )
        decoder = msgspec.msgpack.Decoder(Node | Note)
        current, items = None, Trace()
        for trace, body in self._database.execute(
            "select trace, body from item order by trace, rowid"
        ):
            if trace != current and items:
                yield items
                items = []
            current = trace
            items.append(decoder.decode(body))
        if items:
            yield items
