"""Pictures, and rollouts of agents that look at them; the class's own forward pass as reference."""

from __future__ import annotations

from collections.abc import Sequence
from hashlib import sha256
from io import BytesIO
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from agentrl.algorithms.model.scaled import inputs_of
from agentrl.algorithms.vision.inputs import ImageInputs
from agentrl.core.types import Group, Reward, Rollout, Transition, float32, int32
from tests import factories

WORDS = ["look", "see", "red", "green", "blue", "what", "is", "this", "a", "b", "c", "d", "e", "f"]
KINDS = ("llava", "qwen2_5_vl", "qwen3_vl")


def png(seed: int, width: int = 60, height: int = 30) -> bytes:
    noise = np.random.default_rng(seed).integers(0, 255, (height, width, 3), dtype=np.uint8)
    return encoded(Image.fromarray(noise), "PNG")


def encoded(image: Image.Image, kind: str, **options: Any) -> bytes:
    file = BytesIO()
    image.save(file, kind, **options)
    return file.getvalue()


def digest(body: bytes) -> str:
    return sha256(body).hexdigest()


def eyes_of(model: Any) -> ImageInputs:
    eyes = inputs_of(model)
    assert isinstance(eyes, ImageInputs)
    return eyes


def looked(
    id: str, prompt: Sequence[int | bytes], completion: Sequence[int], model: Any
) -> Transition:
    """A call whose prompt has images between token ids, as a server expands it. Their files are in
    memory."""
    eyes, tokens, images = eyes_of(model), list[int](), list[str]()
    for part in prompt:
        if isinstance(part, bytes):
            seen = eyes.catalogue.add(part)
            images.append(seen.digest)
            tokens += [model.config.image_token_id] * seen.size
        else:
            tokens.append(part)
    return Transition(
        id=id, attempt="a", index=0, prompt=int32(tokens), completion=int32(completion),
        logprobs=float32([-1.0] * len(completion)), images=tuple(images),
    )  # fmt: skip


def rollouts(model: Any, count: int = 4) -> Group:
    """Rollouts of two calls, the second of which sees a second image; pairs share the first."""
    return factories.group(*(_rollout(model, number) for number in range(count)))


def _rollout(model: Any, number: int) -> Rollout:
    first, second = png(number // 2, 60, 30), png(100 + number, 40, 50)
    prompt = [4, 5, first, 6, 1]
    answer, then = [7, 8 + number % 3, 2], [4, second, 9, 10, 1]
    calls = [
        looked(f"{number}/0", prompt, answer, model),
        looked(f"{number}/1", [*prompt, *answer, *then], [11, 12 - number % 2, 2], model),
    ]
    rewards = [Reward(value=float(number % 2))]
    return factories.rollout(str(number), calls, rewards, index=number, attempt="a")


def own_logprobs(model: Any, call: Transition) -> Tensor:
    """Log-probs of a call's completion by the model class's forward pass with pixel values."""
    model.set_attn_implementation("sdpa")
    eyes, tokens = eyes_of(model), torch.tensor([*call.prompt, *call.completion])
    pixels = [eyes.catalogue.pixels(name) for name in call.images]
    inputs = {name: torch.cat([p[name] for p in pixels]) for name in (pixels or [{}])[0]}
    if pixels and model.config.model_type != "llava":
        inputs["mm_token_type_ids"] = (tokens == model.config.image_token_id).int()[None]
    logits = model(input_ids=tokens[None], **inputs).logits[0]
    actions = torch.arange(len(call.prompt), len(tokens))
    return logits.log_softmax(-1)[actions - 1, tokens[actions]]
