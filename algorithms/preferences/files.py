"""The rows of an exported data set. Imported rows are read by `formats`.

Imported items have no tokens: a run renders them with its policy's chat template and learns from
the tokens that the template adds for each answer.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import msgspec

from agentrl.errors import ConfigError
from agentrl.store.base import Store
from agentrl.store.records import Item


async def export_rows(store: Store, items: Iterable[Item]) -> list[dict[str, Any]]:
    """The items in TRL's columns, with exact token ids if they are known."""
    rows: list[dict[str, Any]] = []
    for item in items:
        names = {"chosen": item.chosen, "rejected": item.rejected}
        sides = await store.sides([name for name in names.values() if name])
        first = sides[item.chosen][0]
        row: dict[str, Any] = {"prompt": first.messages, "split": item.split}
        for word, digest in names.items():
            if digest:
                calls = sides[digest]
                said = [*calls[-1].messages[len(first.messages) :], calls[-1].answer]
                key = word if item.kind == "pair" else "completion"
                row[key] = [message for message in said if message]
                if all(call.exact for call in calls):
                    start = len(first.prompt)
                    whole = [*calls[-1].prompt[start:], *calls[-1].completion]
                    row |= {"prompt_ids": list(first.prompt), f"{key}_ids": whole}
        known = {"label": item.label, "labels": item.steps, "margin": item.margin}
        rows.append(row | {key: value for key, value in known.items() if value not in (None, [])})
    return rows


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
