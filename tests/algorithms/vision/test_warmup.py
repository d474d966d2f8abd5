"""A warm-up on demonstrations that show images."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

from agentrl.algorithms.demonstrations import ConversationReader
from agentrl.algorithms.demonstrator import NAME, kept_conversations
from agentrl.algorithms.model.forward import forward_logprobs
from agentrl.algorithms.model.load import end_tokens, load_model
from agentrl.algorithms.model.packing import pack_rows
from agentrl.algorithms.reward_training import Reader
from agentrl.algorithms.train.load_policies import load_policies
from agentrl.core.config import resolve
from agentrl.core.errors import ConfigError, TrainingError
from agentrl.core.types import Image, Reward, RolloutState, float32, int32
from agentrl.store.records import Item, Side, digest_of
from agentrl.tiny import vision
from tests import factories
from tests.algorithms.vision.looks import WORDS, digest, eyes_of, own_logprobs, png
from tests.runners.gateway.images.pictures import url

FIRST, THEN = png(1, 30, 40), png(2, 40, 30)


def conversation(*bodies: bytes) -> dict[str, Any]:
    messages: list[dict[str, Any]] = []
    for number, body in enumerate(bodies):
        part = {"type": "image_url", "image_url": {"url": url(body)}}
        content: list[Any] = [{"type": "text", "text": "what"}, part, {"type": "text", "text": "a"}]
        messages += [{"role": "user", "content": content}]
        messages += [{"role": "assistant", "content": "red" if number else "green b"}]
    return {"messages": messages}


@pytest.mark.parametrize("kind", ["llava", "qwen2_5_vl"])
def test_what_is_imitated_is_read_with_its_images(kind: Any, tmp_path: Path) -> None:
    vision.save(*vision.make(kind, WORDS), tmp_path)
    loaded, tokenizer = load_model(tmp_path, device="cpu")
    model: Any = loaded
    eyes = eyes_of(model)
    reader = ConversationReader(tokenizer, end_tokens(model, tokenizer), eyes)
    (row,) = reader.rows(conversation(FIRST, THEN, FIRST))  # one row, as prompts continue
    seen = [eyes.catalogue.find(digest(body)) for body in (FIRST, THEN, FIRST)]
    assert int((row.tokens < 0).sum()) == sum(one.size for one in seen if one)
    found = forward_logprobs(model, pack_rows([row], "rows", 10**5)[0])
    shown = torch.where(row.tokens < 0, model.config.image_token_id, row.tokens).tolist()
    start, size = int(row.actions[-2]), len(shown)  # of the last answer: a word and the end
    last = factories.call(
        "a", int32(shown[:start]), int32(shown[start:]), logprobs=float32([0.0] * (size - start)),
        images=tuple(digest(body) for body in (FIRST, THEN, FIRST)),
    )  # fmt: skip
    with torch.no_grad():
        own = own_logprobs(model, last)
    assert torch.allclose(found[-len(own) :].float(), own, atol=2e-6)


def test_a_policy_is_warmed_up_on_what_it_sees(tmp_path: Path) -> None:
    vision.save(*vision.make("llava", WORDS), tmp_path / "model")
    lines = [conversation(FIRST), conversation(THEN, FIRST)]
    (tmp_path / "shown.jsonl").write_bytes(msgspec.json.Encoder().encode_lines(lines))
    config = resolve(
        {
            "root": str(tmp_path), "output": str(tmp_path / "run"), "learner": {"threads": 1},
            "policy": {"model": str(tmp_path / "model"), "device": "cpu", "vision": "trained"},
            "warmup": {"data": "shown.jsonl", "steps": 6, "batch": 2, "lr": 1e-3},
        },
        source="test",
    )  # fmt: skip
    (loaded,) = load_policies(config)
    assert (tmp_path / "run/warmup/preprocessor_config.json").is_file()
    before, _ = load_model(tmp_path / "model", device="cpu")
    tower = "model.vision_tower"
    changed = [
        name
        for name, weight in dict(loaded.model.named_parameters()).items()
        if name.startswith(tower) and not torch.equal(weight, before.get_parameter(name))
    ]
    assert changed  # its tower learned from the images


UNSEEN = [
    ({"type": "image_url", "image_url": {"url": "http://x/a.png"}}, "by its address"),
    ({"type": "image_url", "image_url": {"url": url(FIRST[:80])}}, "cannot be read"),
    ({"type": "video_url", "video_url": {"url": "x"}}, "text and images only"),
]


def test_what_cannot_be_seen_is_not_imitated(tmp_path: Path) -> None:
    vision.save(*vision.make("llava", WORDS), tmp_path)
    model, tokenizer = load_model(tmp_path, device="cpu")
    reader = ConversationReader(tokenizer, end_tokens(model, tokenizer), eyes_of(model))
    for part, sentence in UNSEEN:
        messages = [{"role": "user", "content": [part]}, {"role": "assistant", "content": "red"}]
        with pytest.raises(TrainingError, match=sentence):
            reader.rows({"messages": messages})


async def test_kept_demonstrations_have_their_images_as_files() -> None:
    class Shelf:
        async def calls(self, ids: list[str]) -> dict[str, Any]:
            shown = {"type": "image_url", "image_url": {"url": f"image:{digest(FIRST)}"}}
            messages = [{"role": "user", "content": [shown]}]
            answer = {"role": "assistant", "content": "red"}
            about: Any = {"messages": messages, "answer": answer, "policy": NAME}
            return {id: [factories.call(id, images=(digest(FIRST),), **about)] for id in ids}

        async def images(self, run: str, names: Any) -> dict[str, Image]:
            assert (run, names) == ("r", (digest(FIRST),))
            return {name: Image(name, "image/png", 30, 40, FIRST) for name in names}

    row = factories.rollout("a", [], [Reward(value=1.0)], run="r", state=RolloutState.SUCCEEDED)
    shelf: Any = Shelf()
    ((kept,), _) = await kept_conversations(shelf, [row], 1.0)
    assert kept["messages"][0] == {
        "role": "user",
        "content": [{"type": "image_url", "image_url": {"url": url(FIRST)}}],
    }


async def test_a_reward_model_reads_no_image(store: Any) -> None:
    call = factories.call("a", [1, 9], [2], images=(digest(FIRST),))
    side = Side(digest=digest_of([call]), own=[call])
    await store.put_images("", [Image(digest(FIRST), "image/png", 30, 40, FIRST)])
    version = await store.draft_dataset("d", {})
    item = Item(position=0, kind="label", chosen=side.digest, label=1.0)
    await store.add_items("d", version, [item], [side])
    await store.commit_dataset("d", version)
    reader = Reader(store, None, None)
    with pytest.raises(ConfigError, match="its calls show images, and reward models read text"):
        await reader.examples(resolve({"data": {"name": "d"}}, source="test"), "train")
