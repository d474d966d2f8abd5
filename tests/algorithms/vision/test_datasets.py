"""A data set has the images of its calls, also when their rollouts are gone."""

from __future__ import annotations

from io import BytesIO
from pathlib import Path
from typing import Any

import pytest
import torch
from msgspec import structs
from PIL import Image as Pillow

from agentrl.algorithm_process import added_features
from agentrl.algorithms.preferences.completions import mismatched_rollout
from agentrl.algorithms.preferences.draft import Draft
from agentrl.algorithms.preferences.formats import add_row, export_rows
from agentrl.algorithms.train import main
from agentrl.core.config import RunConfig, resolve
from agentrl.core.data_files import read_rows, write_rows
from agentrl.core.errors import ConfigError
from agentrl.core.images import described, url_of
from agentrl.core.types import Image
from agentrl.store import open_store
from agentrl.store.records import Item, Side, digest_of, without_tokens
from agentrl.tiny import vision
from tests import factories
from tests.algorithms.vision.looks import WORDS, digest, looked, own_logprobs, png
from tests.runners.gateway.images.calls import BLUE, DIGESTS, RED, TEXT, named, shown, user


async def test_an_exported_item_has_its_images_as_files(store: Any) -> None:
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
    (row,) = await export_rows(store, [item], described)
    size = len(RED)
    assert row["prompt"] == [{"role": "user", "content": f"[image 8x6 png {size} B] what is this?"}]


# -- runs on a data set ----------------------------------------------------------------------------

LOOKED = {"good": ["red", "b"], "bad": ["green", "c"]}


def tiny_policy(folder: Path, kind: Any = "llava") -> Any:
    model, tokenizer = vision.make(kind, WORDS)
    vision.save(model, tokenizer, folder)
    return model, tokenizer


def sampled(model: Any, tokenizer: Any, number: int, said: list[str], shown: list[bytes]) -> Any:
    """A call with exact tokens, in the tiny model's template."""
    ids = tokenizer.convert_tokens_to_ids
    prompt: list[int | bytes] = [*ids(["<user>", "look"])]
    for body in shown:
        prompt += [body, *ids(["a"])]
    prompt += ids(["<assistant>"])
    call = looked(f"{number}{said}", prompt, [*ids(said), tokenizer.eos_token_id], model)
    after = {"type": "text", "text": "a"}
    seen = [part for body in shown for part in (part_of(body), after)]
    messages = [{"role": "user", "content": [{"type": "text", "text": "look"}, *seen]}]
    answer = {"role": "assistant", "content": " ".join(said)}
    return structs.replace(call, messages=messages, answer=answer)


def part_of(body: bytes) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": f"image:{digest(body)}"}}


def settings(folder: Path, preset: str, **policy: Any) -> RunConfig:
    data = {
        "name": "offline", "output": str(folder / "run"), "steps": 2,
        "store": f"sqlite:///{folder / 'store.db'}",
        "policy": {"model": str(folder / "model"), "device": "cpu", "vision": "frozen", **policy},
        "data": {"name": "looks@1"},
        "algorithm": {"preset": preset, "groups": 4, "lr": 1e-3},
        "learner": {"kind": "torch", "threads": 1},
    }  # fmt: skip
    return resolve(data, source="test")


async def fill(url: str, kind: str, model: Any, tokenizer: Any, *, text: bool) -> list[Any]:
    """Items of six prompts, each with pictures of its own; the calls of the better completions.
    text: without token ids."""
    sides, items, better = [], [], []
    for n in range(6):
        shown = [png(n, 30, 30), png(9, 40, 20)]
        calls = [sampled(model, tokenizer, n, said, shown) for said in LOOKED.values()]
        better.append(calls[0])
        own = [without_tokens(call) if text else call for call in calls]
        made = [Side(digest=digest_of([call]), own=[call]) for call in own]
        about: dict[str, Any] = {"rejected": made[1].digest} if kind == "pair" else {}
        about |= {"label": float(n % 2)} if kind == "label" else {}
        split = "train" if n < 4 else "test"
        items.append(Item(position=n, kind=kind, chosen=made[0].digest, split=split, **about))
        sides += made if kind == "pair" else made[:1]
    async with open_store(url) as store:
        bodies = {digest(body): body for n in (*range(6), 9) for body in [_body(n)]}
        await store.put_images("", [Image(d, "image/png", 9, 9, b) for d, b in bodies.items()])
        await store.add_items("looks", await store.draft_dataset("looks", {}), items, sides)
        await store.commit_dataset("looks", 1)
    return better


def _body(n: int) -> bytes:
    return png(9, 40, 20) if n == 9 else png(n, 30, 30)


@pytest.mark.parametrize(
    ("preset", "kind", "model", "text"),
    [
        ("dpo", "pair", "llava", False),
        ("kto", "label", "qwen2_5_vl", False),
        ("dpo", "pair", "qwen3_vl", True),
        ("sft", "demonstration", "llava", True),
    ],
)
async def test_a_run_on_a_data_set_sees_its_images(
    preset: str, kind: str, model: str, text: bool, tmp_path: Path
) -> None:
    seeing, tokenizer = tiny_policy(tmp_path / "model", model)
    config = settings(tmp_path, preset)
    better = await fill(config.store, kind, seeing, tokenizer, text=text)
    await main.run(config, added_features(config))
    async with open_store(config.store) as store:
        steps = [row.metrics for row in await store.steps("offline") if row.committed]
    assert [step["calls/images_unread"] for step in steps] == [0, 0]
    if preset == "dpo":  # against the class's own forward pass with pixel values
        with torch.no_grad():
            own = [float(own_logprobs(seeing, call).sum()) for call in better[:4]]
        assert steps[0]["images/distinct"] == 5
        assert steps[0]["logps/chosen"] == pytest.approx(sum(own) / 4, abs=1e-5)
        assert steps[0]["preferences/loss"] == pytest.approx(0.6931, abs=1e-4)
        assert steps[1]["preferences/loss"] < steps[0]["preferences/loss"]


async def test_a_policy_of_text_learns_from_no_image(
    tmp_path: Path, tiny_llama_dir: Path, caplog: pytest.LogCaptureFixture
) -> None:
    seeing, tokenizer = tiny_policy(tmp_path / "model")
    config = settings(tmp_path, "dpo", model=str(tiny_llama_dir), vision="")
    await fill(config.store, "pair", seeing, tokenizer, text=False)
    with pytest.raises(ConfigError, match="none can be used"):
        await main.run(config, added_features(config))
    assert "with images, which the policy cannot read: see policy.vision" in caplog.text


def test_completions_of_another_prompt_bring_its_images() -> None:
    first, then, other = png(1), png(2), png(3)
    names = [digest(body) for body in (first, then, other)]
    row = factories.rollout("a", [factories.call("a", [1, 9], [2], images=(names[2],))])
    calls = [
        factories.call("b", [1, 9, 9], [2], images=(names[0],)),
        factories.call("c", [1, 9, 9, 2, 9], [2], images=(names[0], names[1])),
        factories.call("d", [1, 9, 9, 2, 9], [2], images=(names[1], names[1])),  # of another start
    ]
    moved = mismatched_rollout(row, factories.rollout("b", calls)).transitions
    assert [list(call.prompt) for call in moved] == [[1, 9], [1, 9, 2, 9]]
    assert [call.images for call in moved] == [(names[2],), (names[2], names[1])]


# -- imported rows ---------------------------------------------------------------------------------

PARTS = [{"type": "text", "text": "what is this?"}, {"type": "image"}]
ROWS: dict[str, dict[str, Any]] = {
    "data URLs": {
        "prompt": [user(shown(RED), TEXT)],
        "chosen": [{"role": "assistant", "content": "a square"}],
        "rejected": [{"role": "assistant", "content": "a circle"}],
    },
    "TRL's column": {
        "images": [{"bytes": RED, "path": None}],
        "prompt": [user(*PARTS)],
        "chosen": [{"role": "assistant", "content": "a square"}],
        "rejected": [{"role": "assistant", "content": "a circle"}],
    },
    "TRL's column without parts": {
        "images": [{"bytes": RED}],
        "prompt": "what is this?",
        "chosen": "a square",
        "rejected": "a circle",
    },
    "no prompt": {
        "image": {"bytes": RED},
        "chosen": [user(*PARTS), {"role": "assistant", "content": "a square"}],
        "rejected": [user(*PARTS), {"role": "assistant", "content": "a circle"}],
    },
    "a demonstration": {
        "images": [Pillow.open(BytesIO(RED)), {"bytes": BLUE}],
        "messages": [
            user(*PARTS),
            {"role": "assistant", "content": "and"},
            user({"type": "image"}),
            {"role": "assistant", "content": "a square"},
        ],
    },
}


@pytest.mark.parametrize("row", ROWS.values(), ids=ROWS.keys())
async def test_imported_rows_have_their_images(row: dict[str, Any], store: Any) -> None:
    draft = Draft(store, "d", await store.draft_dataset("d", {}), test=0.0)
    add_row(draft, "rows:1", row)
    await draft.commit()
    (item,) = await store.items("d", 1)
    calls = [call for own in (await store.sides(item.sides)).values() for call in own]
    found = await store.images("", sorted({name for call in calls for name in call.images}))
    assert len(found) == (2 if "messages" in row else 1)
    assert {image.width for image in found.values()} <= {8, 12}
    for call in calls:
        urls = [url_of(part) for message in call.messages for part in parts(message)]
        assert [url for url in urls if url] == [f"image:{name}" for name in call.images]
        assert call.images
    assert "bytes" not in str(calls[0].messages)
    (again,) = await export_rows(store, [item])
    assert "data:image/" in str(again["prompt"])


def parts(message: dict[str, Any]) -> list[Any]:
    content = message["content"]
    return content if isinstance(content, list) else []


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"images": []}, r"prompt\[0\].content\[1\] is an image, and the row has 0 images"),
        ({"images": [{"bytes": RED}] * 2}, "2 images, and 1 parts of type 'image'"),
        ({"images": ["a.png"]}, "'a.png' is not an image; give the bytes"),
        ({"images": [{"bytes": RED[:60]}]}, "its file is cut off"),
        ({"images": [{"bytes": b"<svg></svg>"}]}, "it is SVG"),
        ({"prompt": [user({"type": "image_url", "image_url": {"url": "http://x/a.png"}})],
          "images": None}, "its URL is 'http://x/a.png'"),
    ],
)  # fmt: skip
async def test_what_cannot_be_seen_is_not_imported(
    change: dict[str, Any], sentence: str, store: Any
) -> None:
    draft = Draft(store, "d", 1, test=0.0)
    with pytest.raises(ConfigError, match=f"rows:1: .*{sentence}"):
        add_row(draft, "rows:1", ROWS["TRL's column"] | change)


async def test_a_parquet_file_brings_the_images_back(store: Any, tmp_path: Path) -> None:
    pytest.importorskip("pyarrow")
    draft = Draft(store, "d", await store.draft_dataset("d", {}), test=0.0)
    given = ROWS["data URLs"]
    given = given | {"prompt": [{"role": "system", "content": "See."}, *given["prompt"]]}
    add_row(draft, "rows:1", given)
    await draft.commit()
    write_rows(await export_rows(store, await store.items("d", 1)), tmp_path / "d.parquet")
    again = Draft(store, "e", await store.draft_dataset("e", {}), test=0.0)
    for place, row in read_rows(str(tmp_path / "d.parquet")):
        add_row(again, place, row)
    await again.commit()
    (item,) = await store.items("e", 1)
    for own in (await store.sides(item.sides)).values():
        assert own[0].images == (DIGESTS[RED],)
        assert [message["role"] for message in own[0].messages] == ["system", "user"]
