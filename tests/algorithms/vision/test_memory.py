"""What a policy that sees is said to need: its tower, and the embeddings of images."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as hf

from agentrl.algorithms.estimate import (
    bytes_needed,
    checkpoint_bytes,
    layer_bytes,
    shape_of,
    trained_weights,
)
from agentrl.algorithms.train.load_policies import load_policies
from agentrl.algorithms.vision.images import decode
from agentrl.core.config import RunConfig, resolve
from agentrl.tiny import vision
from tests.algorithms.vision.looks import WORDS, eyes_of, png

PAGE = Path(__file__).parents[3] / "docs/how-to/agents-that-look.md"
TEXT = {
    "vocab_size": 151936, "hidden_size": 2048, "intermediate_size": 11008, "num_hidden_layers": 36,
    "num_attention_heads": 16, "num_key_value_heads": 2, "max_position_embeddings": 128000,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e6, "mrope_section": [16, 24, 24]},
    "tie_word_embeddings": True,
}  # fmt: skip
VISION = {
    "depth": 32, "hidden_size": 1280, "intermediate_size": 3420, "num_heads": 16,
    "out_hidden_size": 2048, "fullatt_block_indexes": [7, 15, 23, 31],
}  # fmt: skip
GIB = 2**30


def run(policy: dict[str, Any], **tables: Any) -> RunConfig:
    files = {"agent": {"path": "a.py:a"}, "verifier": {"path": "a.py:a"}}
    tasks = {"tasks": {"train": "t.jsonl"}}
    return resolve({"policy": {"device": "cpu", **policy}, **files, **tasks, **tables}, source="t")


@pytest.mark.parametrize(
    ("kind", "policy"),
    [
        ("llava", {"vision": "frozen"}),
        ("llava", {"vision": "trained"}),
        ("qwen3_vl", {"vision": "frozen"}),
        ("qwen2_5_vl", {"vision": "frozen", "lora": {"rank": 4}}),
        ("qwen2_5_vl", {}),
    ],
)
def test_the_weights_that_learn_are_counted(kind: Any, policy: Any, tmp_path: Path) -> None:
    vision.save(*vision.make(kind, WORDS), tmp_path)
    config = run({"model": str(tmp_path), **policy})
    if "lora" in policy:  # which has no adapter before it is trained
        from agentrl.algorithms.model.lora import LoraAdapters

        (loaded,) = load_policies(run({"model": str(tmp_path), "vision": "frozen"}))
        adapters = LoraAdapters(loaded.model)
        adapters.add("policy", rank=4, alpha=8.0)
        learned = sum(x.numel() for x in adapters.parameters("policy").values())
    else:
        (loaded,) = load_policies(config)
        learned = sum(x.numel() for x in loaded.model.parameters() if x.requires_grad)
    assert trained_weights(config, shape_of(str(tmp_path))) == learned


def test_images_are_counted_as_they_are_kept(tmp_path: Path) -> None:
    vision.save(*vision.make("qwen3_vl", WORDS), tmp_path)
    config = run(
        {"model": str(tmp_path), "vision": "trained"},
        algorithm={"groups": 2, "group_size": 2},
        engine={"max_context": 20},
        learner={"packing": "rows"},
    )
    needed = bytes_needed(config, shape_of(str(tmp_path)))
    (loaded,) = load_policies(config)
    eyes = eyes_of(loaded.model)
    seen = eyes.catalogue.add(png(0, 28, 28))
    (features,) = eyes.learned.of(eyes, [seen])
    images = 80 / seen.size  # of a step's tokens, were they all of images
    assert needed["image embeddings"] == 2 * images * features.numel() * 4
    pixels = eyes.catalogue.pixels(seen.digest)["pixel_values"]
    assert needed["image pixels"] == images * pixels.numel() * 4
    assert "vision tower" not in bytes_needed(
        run({"model": str(tmp_path)}), shape_of(str(tmp_path))
    )
    assert decode(png(0, 28, 28)).size == (28, 28)


@pytest.fixture(scope="module")
def large() -> Any:
    """Qwen2.5-VL-3B without its weights."""
    with torch.device("meta"):
        shape = hf.Qwen2_5_VLConfig(
            text_config=TEXT, vision_config=VISION, tie_word_embeddings=True
        )
        return hf.Qwen2_5_VLForConditionalGeneration(shape)


@pytest.mark.parametrize(
    ("policy", "row"),
    [
        ({"vision": "frozen", "lora": {"rank": 16}}, "| `lora.rank = 16`, `frozen` |"),
        ({"vision": "frozen"}, "| all weights, `frozen` |"),
        ({"vision": "trained"}, "| all weights, `trained` |"),
    ],
)
def test_the_page_says_what_is_computed(large: Any, policy: Any, row: str) -> None:
    config = run(
        {"model": "x", "dtype": "bfloat16", **policy},
        learner={"token_budget": 8192, "gradient_checkpointing": True},
        engine={"max_context": 8192, "max_batch": 8},
        sampling={"max_tokens": 256},
        algorithm={"groups": 4, "group_size": 8},
    )
    found = {name: size / GIB for name, size in bytes_needed(config, large).items()}
    for of_a_cpu in ("packed weights", "image pixels"):
        found.pop(of_a_cpu)
    columns = [found[name] for name in ("weights", "optimizer", "KV cache", "logits")]
    columns += [found["activations"], found["vision tower"], found["image embeddings"]]
    shown = [f"{size:.0f}" if size >= 9.5 else f"{size:.1f}" for size in columns]
    total = f"{sum(found.values()):.0f} GiB"
    assert f"{row} {' | '.join([*shown, total])} |" in PAGE.read_text()
    assert checkpoint_bytes(config, large) < 50 * GIB


def test_the_page_says_what_an_image_costs(large: Any) -> None:
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import smart_resize

    text, page = large.config.get_text_config(), PAGE.read_text()
    assert layer_bytes(run({"model": "x", "dtype": "bfloat16"}), text) > 0
    tower = sum(x.numel() for x in large.model.visual.parameters())
    words = large.num_parameters() - tower
    assert f"{large.num_parameters() / 1e9:.2f} billion weights, {tower / 1e9:.2f} of" in page
    for width, height in ((640, 480), (1280, 800), (1920, 1080), (3840, 2160)):
        high, wide = smart_resize(
            height, width, factor=28, min_pixels=3136, max_pixels=28 * 28 * 16384
        )
        tokens = high * wide // 28**2
        keys = tokens * 36 * 2 * 2 * 128 * 2 / 1e6
        embeddings = tokens * 2048 * 2 / 1e6
        work = [2 * tower * 4 * tokens / 1e12, 2 * words * tokens / 1e12]
        mega = f"{embeddings:.1f}" if embeddings < 9.5 else f"{embeddings:.0f}"
        floating = ", ".join(f"{x:.1f}" if x < 9.5 else f"{x:.0f}" for x in work)
        row = f"| {width} x {height} | {tokens:,} | {keys:.0f} MB | {mega} MB | {floating} TFLOP |"
        assert row in page
