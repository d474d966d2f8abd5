"""A data set has the images of its calls, also when their rollouts are gone."""

from __future__ import annotations

from typing import Any

import pytest

from agentrl.store.records import Item, Side, digest_of
from agentrl.types import Image
from tests import factories
from tests.agentrl.vision.calls import BLUE, DIGESTS, RED, TEXT, named, shown, user

pytestmark = pytest.mark.part


async def test_an_exported_item_has_its_images_as_files(store: Any) -> None:
    from agentrl.algorithms.preferences.files import export_rows

    kinds = {RED: "image/png", BLUE: "image/jpeg"}
    images = [Image(DIGESTS[body], kinds[body], 8, 6, body) for body in (RED, BLUE)]
    await store.put_images("test", images)
    first = factories.call(
        "a",
        [1, 9, 9, 2],
        [3],
        messages=[user(named(RED), TEXT)],
        answer={"role": "assistant", "content": "look again"},
        images=(DIGESTS[RED],),
    )
    later = factories.call(
        "b",
        [1, 9, 9, 2, 3, 9, 9],
        [4],
        messages=[*first.messages, first.answer, user(named(BLUE, detail="low"))],
        answer={"role": "assistant", "content": "a square"},
        images=(DIGESTS[RED], DIGESTS[BLUE]),
    )
    worse = factories.call(
        "c",
        [1, 9, 9, 2],
        [5],
        messages=first.messages,
        answer={"role": "assistant", "content": "a circle"},
        images=(DIGESTS[RED],),
    )
    calls = {"good": [first, later], "bad": [worse]}
    sides = {name: Side(digest=digest_of(some), own=some) for name, some in calls.items()}
    item = Item(position=0, kind="pair", chosen=sides["good"].digest, rejected=sides["bad"].digest)
    version = await store.draft_dataset("d", {})
    await store.add_items("d", version, [item], [*sides.values()])
    (row,) = await export_rows(store, [item])
    assert row["prompt"] == [user(shown(RED), TEXT)]
    blue = shown(BLUE, detail="low")
    blue["image_url"]["url"] = blue["image_url"]["url"].replace("png", "jpeg")
    assert row["chosen"] == [first.answer, user(blue), later.answer]
    assert row["rejected"] == [worse.answer]
    assert row["prompt_ids"] == [1, 9, 9, 2]
