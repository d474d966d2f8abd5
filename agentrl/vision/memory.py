"""The memory that a policy needs to look, beside its text: estimated from shapes and settings.

Of rollouts whose contexts are full of distinct images, up to the limits of what is kept, each as
large as a screenshot: the tower reads an image at once."""

from __future__ import annotations

from typing import Any

from agentrl.config import RunConfig
from agentrl.vision.classes import CLASSES
from agentrl.vision.eyes import EMBEDDING_BYTES
from agentrl.vision.images import PIXEL_BYTES

SCREEN = 1280 * 800  # pixels


def needed(config: RunConfig, network: Any) -> tuple[int, dict[str, float]]:
    """The weights of a tower that does not learn, and bytes by use; nothing for a text model."""
    from agentrl.algorithms.preflight.estimate import (
        WIDE,
        bytes_of_weight,
        on_gpu,
        tokens_of_step,
    )

    shape = network.config
    if shape.model_type not in CLASSES:
        return 0, {}
    trained, sees = config.policy.vision == "trained", bool(config.policy.vision)
    kind = CLASSES[shape.model_type](network)
    frozen = sum(
        weight.numel()
        for part in (kind.unused if trained else kind.towers)
        for weight in part.parameters()
    )
    if not sees:
        return frozen, {}
    vision, text = shape.vision_config, shape.get_text_config()
    width, merged = bytes_of_weight(config), getattr(vision, "spatial_merge_size", 1) ** 2
    tokens = tokens_of_step(config, text)
    deep = 1 + len(getattr(vision, "deepstack_visual_indexes", None) or ())
    embeddings = min(EMBEDDING_BYTES, tokens * text.hidden_size * deep * width)
    patch = 3 * vision.patch_size**2 * getattr(vision, "temporal_patch_size", 1)
    pixels = 0 if on_gpu(config) else min(PIXEL_BYTES, tokens * merged * patch * WIDE)
    size = getattr(vision, "image_size", None)  # LLaVA's, whatever the size of the image
    screen = (size * size if isinstance(size, int) else SCREEN) // vision.patch_size**2
    patches = min(max(config.learner.token_budget, screen), tokens * merged)
    return frozen, {
        # The engine has its own of a tower that learns.
        "image embeddings": embeddings * (1 + (trained and config.engine.kind == "embedded")),
        "image pixels": pixels,
        "vision tower": patches * tower_bytes(config, vision, trained=trained),
    }


def tower_bytes(config: RunConfig, vision: Any, *, trained: bool) -> int:
    """Bytes that the tower needs per patch: of a layer, or of all that a backward pass reads."""
    from agentrl.algorithms.preflight.estimate import WIDE, bytes_of_weight

    width, hidden = bytes_of_weight(config), int(vision.hidden_size)
    layers = int(getattr(vision, "num_hidden_layers", None) or vision.depth)
    inner = int(vision.intermediate_size)
    # Two norms with their float32 input, queries, keys, values and their result, the MLP's four.
    layer = 2 * WIDE * hidden + width * (9 * hidden + 4 * inner)
    if not trained:
        return layer
    if config.learner.gradient_checkpointing:
        return layers * hidden * width + layer
    return layers * layer
