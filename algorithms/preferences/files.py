"""The rows of an exported data set. Imported rows are read by `formats`.

Imported items have no tokens: a run renders them with its policy's chat template and learns from
the tokens that the template adds for each answer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

from agentrl.base.images import with_data_urls
from agentrl.store.base import Store
from agentrl.store.records import Item
from agentrl.types import Image, Json

Messages = list[dict[str, Json]]
Written = Callable[[Messages, Mapping[str, Image]], Messages]


async def export_rows(
    store: Store, items: Iterable[Item], written: Written = with_data_urls
) -> list[dict[str, Any]]:
    """The items in TRL's columns, with exact token ids if they are known. written: how messages
    show images, by default as data URLs."""
    rows: list[dict[str, Any]] = []
    for item in items:
        names = {"chosen": item.chosen, "rejected": item.rejected}
        sides = await store.sides([name for name in names.values() if name])
        first = sides[item.chosen][0]
        seen = {image for calls in sides.values() for call in calls for image in call.images}
        images = await store.images("", sorted(seen)) if seen else {}
        prompt = written(first.messages, images)
        row: dict[str, Any] = {"prompt": prompt, "split": item.split}
        if first.tools:
            row["tools"] = first.tools
        for word, digest in names.items():
            if digest:
                calls = sides[digest]
                said = [*calls[-1].messages[len(first.messages) :], calls[-1].answer]
                key = word if item.kind == "pair" else "completion"
                row[key] = written([message for message in said if message], images)
                if all(call.exact for call in calls):
                    start = len(first.prompt)
                    whole = [*calls[-1].prompt[start:], *calls[-1].completion]
                    row |= {"prompt_ids": list(first.prompt), f"{key}_ids": whole}
        known = {"label": item.label, "labels": item.steps, "margin": item.margin}
        rows.append(row | {key: value for key, value in known.items() if value not in (None, [])})
    return rows
