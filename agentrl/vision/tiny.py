"""Tiny image-text models with random weights: for tests, benchmarks and examples."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import torch
import transformers as hf

from agentrl.algorithms.model.inputs import attach, inputs_of
from agentrl.algorithms.model.tiny import word_tokenizer
from agentrl.vision.classes import CLASSES
from agentrl.vision.eyes import ImageInputs

TinyKind = Literal["llava", "qwen2_5_vl", "qwen3_vl"]
SIDE = 28  # pixels of the images that LLaVA's copies see
IMAGE, VIDEO = "<image>", "<video>"  # placeholders
TEMPLATE = """\
{%- for message in messages -%}
{{- '<' + message.role + '> ' }}
{%- if message.content is string -%}
{{ message.content }}
{%- else -%}
{%- for part in message.content -%}
{{ ' <image> ' if part.type == 'image' else part.text }}
{%- endfor -%}
{%- endif -%}
{{ ' <end> ' if message.role == 'assistant' else ' ' }}
{%- endfor -%}
{%- if add_generation_prompt %}{{ '<assistant> ' }}{% endif -%}
"""
"""As `model.tiny.WORDS_TEMPLATE`, with images."""


def make(
    kind: TinyKind,
    words: Sequence[str],
    *,
    seed: int = 0,
    hidden: int = 64,
    trained: bool = False,
    patch: int = 0,
    most: int = SIDE * SIDE,
) -> tuple[Any, Any]:
    """A model of 0.2 M parameters that can look, and its tokenizer with a token for each word.

    trained: whether its tower learns. hidden: 64, or 128 for vLLM on a CPU. patch: pixels of a
    patch's side, default 14 (LLaVA) or 7. most: pixels of an image that Qwen's copies
    see; larger ones are made smaller."""
    torch.manual_seed(seed)
    # Tokens of their own, also where they touch other text.
    marks = (
        {"image_token": IMAGE} if kind == "llava" else {"image_token": IMAGE, "video_token": VIDEO}
    )
    roles = ("user", "assistant", "system", "tool")
    tokenizer = word_tokenizer([*words, *marks.values()], roles, **marks)
    tokenizer.chat_template = TEMPLATE
    image = tokenizer.convert_tokens_to_ids(IMAGE)
    text: dict[str, Any] = {
        "vocab_size": len(tokenizer), "hidden_size": hidden, "intermediate_size": 2 * hidden,
        "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
        "max_position_embeddings": 2048, "initializer_range": 0.1, "bos_token_id": None,
        "eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id,
    }  # fmt: skip
    build = _llava if kind == "llava" else _qwen
    model, processor = build(
        kind, text, image, hidden, patch or (14 if kind == "llava" else 7), most
    )
    model.generation_config.eos_token_id = tokenizer.eos_token_id
    attach(model, ImageInputs(model, processor, CLASSES[kind](model), trained=trained))
    return model.eval(), tokenizer


def save(model: Any, tokenizer: Any, directory: Any) -> None:
    """Write a checkpoint that `load_model` reads."""
    model.save_pretrained(directory)
    tokenizer.save_pretrained(directory)
    inputs = inputs_of(model)
    assert inputs is not None
    inputs.save(Path(directory))


def _llava(
    kind: str, text: dict[str, Any], image: int, hidden: int, patch: int, most: int
) -> tuple[Any, Any]:
    vision = hf.CLIPVisionConfig(
        hidden_size=hidden, intermediate_size=2 * hidden, num_hidden_layers=2,
        num_attention_heads=4, image_size=SIDE, patch_size=patch, initializer_range=0.1,
    )  # fmt: skip
    config = hf.LlavaConfig(
        text_config=hf.LlamaConfig(**text), vision_config=vision, image_token_id=image,
        vision_feature_layer=-1, tie_word_embeddings=True,
    )  # fmt: skip
    processor = hf.LlavaImageProcessorPil(
        size={"shortest_edge": SIDE}, crop_size={"height": SIDE, "width": SIDE}
    )
    return hf.LlavaForConditionalGeneration(config), processor


def _qwen(
    kind: str, text: dict[str, Any], image: int, hidden: int, patch: int, most: int
) -> tuple[Any, Any]:
    eighth = hidden // 64  # of half a head
    sections = [2 * eighth, 3 * eighth, 3 * eighth]
    rope = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": sections}
    text |= {"rope_parameters": rope, "tie_word_embeddings": True}
    vision: dict[str, Any] = {
        "depth": 2, "hidden_size": hidden, "intermediate_size": 2 * hidden, "num_heads": 4,
        "out_hidden_size": hidden, "patch_size": patch, "initializer_range": 0.1,
    }  # fmt: skip
    common = {"image_token_id": image, "tie_word_embeddings": True}
    processor = hf.Qwen2VLImageProcessorPil(
        patch_size=patch, min_pixels=min(most, SIDE * SIDE), max_pixels=most
    )
    if kind == "qwen3_vl":
        vision |= {"deepstack_visual_indexes": [0], "num_position_embeddings": 16}
        text["head_dim"] = hidden // 4
        rope["mrope_interleaved"] = True  # as the class does anyway, and vLLM does if told
        config = hf.Qwen3VLConfig(text_config=text, vision_config=vision, **common)
        return hf.Qwen3VLForConditionalGeneration(config), processor
    vision |= {"window_size": 4 * patch, "fullatt_block_indexes": [1]}
    config = hf.Qwen2_5_VLConfig(text_config=text, vision_config=vision, **common)
    return hf.Qwen2_5_VLForConditionalGeneration(config), processor
