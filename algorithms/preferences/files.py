"""The rows of an exported data set. Imported rows are read by `formats`.

Imported items have no tokens: a run renders them with its policy's chat template and learns from
the tokens that the template adds for each answer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from agentrl.base.images import in_words, with_data_urls
from agentrl.store.base import Store
from agentrl.store.records import Item
from agentrl.types import Image, Json

Messages = list[dict[str, Json]]
Written = Callable[[Messages, Mapping[str, Image]], Messages]


def alike(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Rows for a file of typed columns, where contents are all text or all lists of parts."""
    talks = [value for row in rows for value in row.values() if _is_talk(value)]
    if not any(isinstance(one.get("content"), list) for talk in talks for one in talk):
        return list(rows)
    return [
        {key: [*map(_in_parts, x)] if _is_talk(x) else x for key, x in row.items()} for row in rows
    ]


def _is_talk(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(one, dict) for one in value)


def _in_parts(message: dict[str, Any]) -> dict[str, Any]:
    content = message.get("content")
    if not isinstance(content, str):
        return message
    return message | {"content": [{"type": "text", "text": content}]}


def described(
    messages: Sequence[dict[str, Json]], images: Mapping[str, Image]
) -> list[dict[str, Json]]:
    """Messages with images in words, for a person."""
    return [_described(message, images) for message in messages]


def _described(message: dict[str, Json], images: Mapping[str, Image]) -> dict[str, Json]:
    content = message.get("content")
    if not isinstance(content, list):
        return message
    words = [in_words(part, images) for part in content]
    return message | {"content": [w or part for w, part in zip(words, content, strict=True)]}


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
