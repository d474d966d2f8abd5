"""The classes of image-text models that can be policies, by their `model_type`."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
import torch
import transformers
from packaging.version import Version
from torch import Tensor
from torch.nn import Module

from agentrl.errors import PolicyError, install_command
from agentrl.vision.images import Ids, Pixels

# Older ones compute other embeddings or positions of images than Qwen's classes should.
OLDEST = "5.10"  # transformers, as in the extra `vision`


def check_version(what: str) -> None:
    """Raise PolicyError about `what` if transformers cannot compute what looks."""
    if Version(transformers.__version__) < Version(OLDEST):
        raise PolicyError(
            f"{what}: models that look need transformers {OLDEST} or newer, not "
            f"{transformers.__version__}; {install_command('vision', ' -U')}"
        )


@lru_cache(256)  # screenshots have one size, and a process sees millions
def _places(*grid: int) -> Ids:
    """The places of a grid's cells, int64 [axes, cells], which nobody changes."""
    places = np.indices(grid).reshape(len(grid), -1)
    places.flags.writeable = False
    return places


@dataclass(frozen=True, slots=True)
class Llava:
    """CLIP's patches through a projector; ordinary positions."""

    network: Any  # `LlavaForConditionalGeneration`

    @property
    def towers(self) -> tuple[Module, ...]:
        """What computes visual embeddings, and nothing else."""
        return self.network.model.vision_tower, self.network.model.multi_modal_projector

    @property
    def unused(self) -> tuple[Module, ...]:
        """What visual embeddings do not depend on: it gets no gradient."""
        clip, chosen = self.network.model.vision_tower, self.network.config.vision_feature_layer
        clip = getattr(clip, "vision_model", clip)
        size = len(clip.encoder.layers)
        last = max(
            layer % (size + 1) for layer in ([chosen] if isinstance(chosen, int) else chosen)
        )
        return (clip.post_layernorm, *clip.encoder.layers[last:])

    @property
    def processor(self) -> dict[str, object]:
        """The content of processor_config.json, without the image processor's own file: other
        libraries expand placeholders by it."""
        config = self.network.config
        return {
            "processor_class": "LlavaProcessor",
            "patch_size": config.vision_config.patch_size,
            "vision_feature_select_strategy": config.vision_feature_select_strategy,
            "num_additional_image_tokens": 1,  # CLIP's first
        }

    @property
    def counts(self) -> tuple[object, ...]:
        """What `shape` depends on beside the pixels."""
        config = self.network.config
        return "llava", config.vision_config.patch_size, config.vision_feature_select_strategy

    def shape(self, pixels: Pixels) -> tuple[int, int, Ids, int]:
        """Visual embeddings, patches, their places and extent, as in `Seen`."""
        height, width = pixels["pixel_values"].shape[-2:]
        config = self.network.config
        patches = (height // config.vision_config.patch_size) * (
            width // config.vision_config.patch_size
        )
        size = patches + (config.vision_feature_select_strategy != "default")
        return size, patches, _places(size), size

    def features(self, pixels: list[Pixels]) -> list[Tensor]:
        """Visual embeddings [size, H] of each image; [size, H * (1 + layers)] with DeepStack."""
        config, weight = self.network.config, next(self.network.model.vision_tower.parameters())
        found = self.network.model.get_image_features(
            pixel_values=torch.cat([each["pixel_values"] for each in pixels]).to(weight),
            vision_feature_layer=config.vision_feature_layer,
            vision_feature_select_strategy=config.vision_feature_select_strategy,
        )
        return list(found.pooler_output)


@dataclass(frozen=True, slots=True)
class Qwen:
    """Qwen2.5-VL and Qwen3-VL: any size, three rotary axes, and in Qwen3-VL embeddings for deeper
    layers too, beside each other."""

    network: Any

    @property
    def towers(self) -> tuple[Module, ...]:
        return (self.network.model.visual,)

    @property
    def unused(self) -> tuple[Module, ...]:
        return ()

    @property
    def processor(self) -> dict[str, object]:
        return {"processor_class": PROCESSORS[self.network.config.model_type]}

    @property
    def counts(self) -> tuple[object, ...]:
        return "qwen", self.network.config.vision_config.spatial_merge_size

    def shape(self, pixels: Pixels) -> tuple[int, int, Ids, int]:
        time, height, width = pixels["image_grid_thw"][0].tolist()
        merge = self.network.config.vision_config.spatial_merge_size
        rows, columns = height // merge, width // merge
        places = _places(time, rows, columns)
        return places.shape[1], time * height * width, places, max(rows, columns)

    def features(self, pixels: list[Pixels]) -> list[Tensor]:
        device = next(self.network.model.visual.parameters()).device
        output = self.network.model.get_image_features(
            pixel_values=torch.cat([each["pixel_values"] for each in pixels]).to(device),
            image_grid_thw=torch.cat([each["image_grid_thw"] for each in pixels]).to(device),
        )
        found = list(output.pooler_output)
        if deep := getattr(output, "deepstack_features", None):
            sizes = [len(each) for each in found]
            # since transformers 5.18 they come by image, as the others do
            split = (torch.split(x, sizes) if isinstance(x, Tensor) else x for x in deep)
            parts = zip(found, *split, strict=True)
            found = [torch.cat(each, -1) for each in parts]
        return found


PROCESSORS = {"qwen2_5_vl": "Qwen2_5_VLProcessor", "qwen3_vl": "Qwen3VLProcessor"}
CLASSES: dict[str, type[Llava] | type[Qwen]] = {
    "llava": Llava,
    "qwen2_5_vl": Qwen,
    "qwen3_vl": Qwen,
}
# Why others cannot be, as the end of a sentence about their type.
REASONS = {
    "gemma3": "in which the tokens of an image attend to each other in both directions",
    "gemma3n": "in which the tokens of an image attend to each other in both directions",
    "gemma4": "in which the tokens of an image attend to each other in both directions",
    "paligemma": "in which a prompt attends in both directions",
    "qwen3_5": "with layers of linear attention, along whose branches nothing can be packed",
    "qwen3_5_moe": "with layers of linear attention, along whose branches nothing can be packed",
    "mllama": "in which text attends to images across, not among its own tokens",
}
