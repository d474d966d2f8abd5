"""A store with a run whose agent looks at images of every kind that a page can meet."""

from __future__ import annotations

import json
import shutil
from hashlib import sha256
from io import BytesIO
from pathlib import Path
from typing import Any

from PIL import Image as Pillow
from PIL import ImageDraw

from agentrl.core.types import Attempt, Image, NewRollout, Outcome, Purpose, Reward, int32
from agentrl.store import open_store
from agentrl.store.records import Item, Side, digest_of
from tests.agentrl.view import filled

RUN = "look"
ROLLOUT = f"{RUN}/train/g0000000/0000"
PLACEHOLDER = 70  # of the tiny tokenizer: some ordinary token
SVG = b"<svg xmlns='http://www.w3.org/2000/svg'><script>document.title='owned'</script></svg>"


def page(seed: int, size: tuple[int, int] = (1280, 800), form: str = "PNG") -> bytes:
    """A picture of a small web page."""
    image = Pillow.new("RGB", size, (246, 247, 250))
    draw, (width, height) = ImageDraw.Draw(image), size
    draw.rectangle((0, 0, width, height // 9), fill=(40 + 40 * seed % 200, 70, 160))
    for row in range(6):
        top = height // 6 + row * height // 8
        wide = width * (3 + (row * 7 + seed * 3) % 6) // 10
        draw.rectangle((width // 12, top, wide, top + height // 16), fill=(90, 160 - 20 * row, 120))
    file = BytesIO()
    image.save(file, form)
    return file.getvalue()


def image(body: bytes, width: int, height: int, media_type: str = "image/png") -> Image:
    return Image(sha256(body).hexdigest(), media_type, width, height, body)


SCREEN, PHOTO = (
    image(page(0), 1280, 800),
    image(page(1, (600, 900), "JPEG"), 600, 900, "image/jpeg"),
)
TINY, TALL = image(page(2, (14, 14)), 14, 14), image(page(3, (20, 900)), 20, 900)
VECTOR = image(SVG, 10, 10, "image/svg+xml")  # by another writer than this library's gateway
GONE = sha256(b"pruned").hexdigest()
LABEL = f"[image 1280x800 png {len(SCREEN.body) / 1000:.0f} kB]"


def part(digest: str, **more: object) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": f"image:{digest}", **more}}


def text(words: str) -> dict[str, Any]:
    return {"type": "text", "text": words}


def messages(other: Image = PHOTO) -> list[dict[str, Any]]:
    return [
        {"role": "system", "content": [text("Look closely at this:"), part(TINY.digest)]},
        {
            "role": "user",
            "content": [text(f"before {filled.HOSTILE}"), part(SCREEN.digest), text("after it")],
        },
        {"role": "assistant", "content": "I open it."},
        {
            "role": "tool",
            "tool_call_id": "c",
            "content": [part(other.digest), part(TALL.digest), part(VECTOR.digest), part(GONE)],
        },
        {
            "role": "user",
            "content": [{"type": "image_url", "image_url": {"url": "https://x.example/a.png"}}],
        },
    ]


async def fill(url: str, folder: Path, model: Path) -> None:
    """Two rollouts with the same images, one without, and a data set of a pair."""
    reader = folder / "model"
    shutil.copytree(model, reader)
    shape = json.loads((reader / "config.json").read_text())
    (reader / "config.json").write_text(json.dumps(shape | {"image_token_id": PLACEHOLDER}))
    async with open_store(url) as store:
        await store.open_run(RUN, filled.config(folder, reader, name=RUN))
        await store.put_images(RUN, [SCREEN, PHOTO, TINY, TALL, VECTOR])
        group = f"{RUN}/train/g0000000"
        rows = [
            NewRollout(
                id=f"{group}/{i:04}", run=RUN, group=group, index=i, task={"input": "Which shop?"},
                purpose=Purpose.TRAIN, max_attempts=1,
            )
            for i in range(3)
        ]  # fmt: skip
        await store.enqueue(rows)
        calls = {}
        for attempt in await store.claim(3, runner="t", lease=60.0, run=RUN, timeout=5.0):
            i = attempt.rollout.index
            calls[i] = [_looked(attempt, looks=i < 2)]
            await store.add_transitions(calls[i])
            reward = [Reward(value=float(i == 0))]
            await store.finish(
                [Outcome(attempt=attempt.id, fence=attempt.fence, rewards=reward, result="shop")]
            )
        version = await store.draft_dataset("looks", {"run": RUN})
        sides = [Side(digest=digest_of(calls[i]), rollout=f"{group}/{i:04}") for i in (0, 1)]
        item = Item(position=0, kind="pair", chosen=sides[0].digest, rejected=sides[1].digest)
        await store.add_items("looks", version, [item], sides)
        await store.commit_dataset("looks", version)


def _looked(attempt: Attempt, *, looks: bool) -> Any:
    said = messages() if looks else [{"role": "user", "content": "no image"}]
    shown = (TINY, SCREEN, PHOTO, TALL, VECTOR) if looks else ()
    prompt = [71]
    for number, _ in enumerate(shown):
        prompt += [PLACEHOLDER] * (4 + number) + [71]
    more: Any = {"completion": int32([72 + attempt.rollout.index, *filled.WORDS])}
    more["logprobs"] = type(filled.call(attempt, 0, []).logprobs)("f", [-0.1] * 13)
    return filled.call(
        attempt, 0, said, prompt=int32(prompt), images=tuple(x.digest for x in shown), **more
    )
