"""Tiny image-text models with random weights: for tests, benchmarks and examples."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import torch
import transformers as hf
from transformers.utils.chat_template_utils import render_jinja_template

from agentrl.algorithms.data.batch import TokenRow
from agentrl.algorithms.model.scaled import attach, inputs_of
from agentrl.algorithms.vision.images import CatalogueImage, ids_of
from agentrl.algorithms.vision.inputs import (
    CLASSES,
    Embeddings,
    ImageInputs,
    check_version,
    data_of,
    image_urls,
)
from agentrl.core.files import share_weights
from agentrl.core.types import Json
from agentrl.tiny import models as text

TinyKind = Literal["llava", "qwen2_5_vl", "qwen3_vl"]
SIDE = 28  # side of images for LLaVA, in pixels
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
"""As `tiny.models.WORDS_TEMPLATE`, with images."""
ROLES = ("user", "assistant", "system", "tool")
PARTS = """\
{%- if message.content is string -%}{{ message.content }}{%- else -%}
{%- for part in message.content -%}
{{ '<image>' if part.type == 'image' else part.text }}
{%- endfor -%}
{%- endif -%}
"""
TOOLS_TEMPLATE = text.TEMPLATE.replace("{{- message.content }}\n", PARTS)
"""As `tiny.models.TEMPLATE`, with images in the messages of users and tools."""


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
    """An image-text model of 0.2 M parameters, and its tokenizer with one token per word. trained:
    whether the vision tower is trainable. hidden: 64, or 128 for vLLM on a CPU. patch: side of a
    patch in pixels, default 14 (LLaVA) or 7. most: maximum pixels of an image for models like
    Qwen's; larger images are scaled down. Raises PolicyError if transformers is too old."""
    torch.manual_seed(seed)
    marks = _marks(kind)
    tokenizer = text.word_tokenizer([*words, *marks.values()], ROLES, **marks)
    tokenizer.chat_template = TEMPLATE
    model = make_model(kind, tokenizer, hidden=hidden, trained=trained, patch=patch, most=most)
    return model, tokenizer


def _marks(kind: TinyKind) -> dict[str, str]:
    """The placeholder tokens of a model class."""
    return {"image_token": IMAGE} | ({} if kind == "llava" else {"video_token": VIDEO})


def make_model(
    kind: TinyKind,
    tokenizer: Any,
    *,
    hidden: int = 64,
    trained: bool = False,
    patch: int = 0,
    most: int = SIDE * SIDE,
) -> Any:
    """A model like that of `make` for a given tokenizer, which gets a token for images. Raises
    PolicyError if transformers is too old."""
    check_version(f"a tiny {kind}")
    if IMAGE not in tokenizer.all_special_tokens:  # special tokens match without spaces around them
        tokenizer.add_special_tokens(
            {"additional_special_tokens": [IMAGE]}, replace_extra_special_tokens=False
        )
    image = tokenizer.convert_tokens_to_ids(IMAGE)
    shape: dict[str, Any] = {
        "vocab_size": len(tokenizer), "hidden_size": hidden, "intermediate_size": 2 * hidden,
        "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
        "max_position_embeddings": 2048, "initializer_range": 0.1, "bos_token_id": None,
        "eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id,
    }  # fmt: skip
    build = _llava if kind == "llava" else _qwen
    model, processor = build(
        kind, shape, image, hidden, patch or (14 if kind == "llava" else 7), most
    )
    model.generation_config.eos_token_id = tokenizer.eos_token_id
    attach(model, ImageInputs(model, processor, CLASSES[kind](model), trained=trained))
    return model.eval()


def imitator(
    directory: Path,
    conversations: Sequence[text.Conversation],
    *,
    seed: int,
    tools: list[dict[str, Json]] | None = None,
    tokens: Sequence[str] = (),
    kind: TinyKind = "llava",
    patch: int = 0,
    steps: int = 300,
    lr: float = 1e-3,
) -> float:
    """Train a model, including its tower, to imitate the assistant of conversations with images;
    write it as `save` does. Returns the final loss in nats per assistant token. conversations: in
    the format of the API, images as data URLs. tokens: texts that become one token each. Other
    parameters as in `agentrl.tiny.imitator`."""
    torch.manual_seed(seed)
    plain = [[_plain(message) for message in each] for each in conversations]
    texts, _ = render_jinja_template(plain, tools=tools, chat_template=TOOLS_TEMPLATE)
    tokenizer = text.make_tokenizer(texts, TOOLS_TEMPLATE)
    tokenizer.add_tokens(list(tokens))
    model = make_model(kind, tokenizer, trained=True, patch=patch)
    encoder = inputs_of(model)
    assert isinstance(encoder, ImageInputs)
    kept, encoder.learned = encoder.learned, _Encoded(shared=False)
    rows = [
        _with_images(row, messages, encoder)
        for row, messages in zip(text.rows_of(tokenizer, plain, tools), conversations, strict=True)
    ]
    loss = text.imitate(model, rows, steps=steps, batch=16, lr=lr, seed=seed)
    encoder.learned = kept
    save(model, tokenizer, directory)
    return loss


class _Encoded(Embeddings):
    """Image embeddings that gradients pass through: nothing is cached."""

    def of(self, encoder: ImageInputs, images: Sequence[CatalogueImage]) -> list[torch.Tensor]:
        return encoder.encode(images)


def _plain(message: dict[str, Json]) -> dict[str, Json]:
    """A message for the template."""
    content = message.get("content")
    if not isinstance(content, list):
        return message
    kinds = [{"type": "image"} if part.get("type") == "image_url" else part for part in content]
    return message | {"content": kinds}


def _with_images(row: TokenRow, messages: text.Conversation, encoder: ImageInputs) -> TokenRow:
    """A row in which the placeholders of images are replaced by the images' tokens."""
    images = [encoder.catalogue.add(data_of(url)) for url in image_urls(messages)]
    own = row.tokens == encoder.model.config.image_token_id
    if not images:
        return row
    sizes = torch.ones_like(row.tokens)
    sizes[own] = torch.tensor([seen.size for seen in images])
    tokens = row.tokens.repeat_interleave(sizes)
    ids = [torch.from_numpy(ids_of(seen)) for seen in images]
    tokens[own.repeat_interleave(sizes)] = torch.cat(ids)
    return replace(row, tokens=tokens, actions=(sizes.cumsum(0) - sizes)[row.actions])


def save(model: Any, tokenizer: Any, directory: Any) -> None:
    """Write a checkpoint that `load_model` reads."""
    model.save_pretrained(directory)
    tokenizer.save_pretrained(directory)
    inputs = inputs_of(model)
    assert inputs is not None
    inputs.save(Path(directory))
    share_weights(Path(directory))


def _llava(
    kind: str, shape: dict[str, Any], image: int, hidden: int, patch: int, most: int
) -> tuple[Any, Any]:
    vision = hf.CLIPVisionConfig(
        hidden_size=hidden, intermediate_size=2 * hidden, num_hidden_layers=2,
        num_attention_heads=4, image_size=SIDE, patch_size=patch, initializer_range=0.1,
    )  # fmt: skip
    config = hf.LlavaConfig(
        text_config=hf.LlamaConfig(**shape), vision_config=vision, image_token_id=image,
        vision_feature_layer=-1, tie_word_embeddings=True,
    )  # fmt: skip
    processor = hf.LlavaImageProcessorPil(
        size={"shortest_edge": SIDE}, crop_size={"height": SIDE, "width": SIDE}
    )
    return hf.LlavaForConditionalGeneration(config), processor


def _qwen(
    kind: str, shape: dict[str, Any], image: int, hidden: int, patch: int, most: int
) -> tuple[Any, Any]:
    eighth = hidden // 64  # an eighth of half the head dimension
    sections = [2 * eighth, 3 * eighth, 3 * eighth]
    rope = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": sections}
    shape |= {"rope_parameters": rope, "tie_word_embeddings": True}
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
        shape["head_dim"] = hidden // 4
        rope["mrope_interleaved"] = True  # the class's default, but vLLM needs the setting
        config = hf.Qwen3VLConfig(text_config=shape, vision_config=vision, **common)
        return hf.Qwen3VLForConditionalGeneration(config), processor
    vision |= {"window_size": 4 * patch, "fullatt_block_indexes": [1]}
    config = hf.Qwen2_5_VLConfig(text_config=shape, vision_config=vision, **common)
    return hf.Qwen2_5_VLForConditionalGeneration(config), processor
