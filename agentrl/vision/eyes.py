"""How an image-text model reads the ids of images (`model.inputs`).

Owns the visual embeddings of a model. Always true: an image is encoded once for a set of weights of
the tower, as long as its embeddings are kept; those of a frozen tower are kept over steps, and
shared by the learner and the engine. Embeddings go into the text decoder, so packing, the KV cache
and the head are those of text.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import Module

from agentrl.algorithms.model.chat import Chat
from agentrl.algorithms.model.packing import Pack
from agentrl.algorithms.model.text import Codec
from agentrl.vision.classes import Llava, Qwen
from agentrl.vision.images import Catalogue, Ids, Pixels, Recent, Seen, positions, rows_of

if TYPE_CHECKING:
    from PIL.Image import Image

NAMES = ("_processor_class", "processor_class", "image_processor_type", "_name_or_path")
EMBEDDING_BYTES = 2**30  # of visual embeddings that are kept


FileSource = Callable[[Sequence[str]], Awaitable[Mapping[str, bytes]]]
"""Returns the files of images by digest, without those that it does not have."""


class Embeddings:
    """Visual embeddings of images, without a graph. Thread-safe. shared: by copies of the model,
    because its tower does not change."""

    def __init__(self, *, shared: bool) -> None:
        self._shared = shared
        self._found = Recent(_bytes)
        self._lock = threading.RLock()
        self.encoded = 0  # images encoded so far

    def __deepcopy__(self, memo: object) -> Embeddings:
        return self if self._shared else Embeddings(shared=False)

    def of(self, eyes: ImageInputs, images: Sequence[Seen]) -> list[Tensor]:
        with self._lock:
            missing = [seen for seen in images if seen.digest not in self._found]
            # Not in the engine's inference mode, whose tensors a graph may not use.
            with torch.inference_mode(False), torch.no_grad():
                for some in chunks(missing, eyes.budget):
                    for seen, embeddings in zip(some, eyes.encode(some), strict=True):
                        self._found.put(seen.digest, embeddings)
            self.encoded += len(missing)
            found = [self._found.use(seen.digest) for seen in images]
            self._found.shrink(EMBEDDING_BYTES, {seen.digest for seen in images})
            return found

    def __contains__(self, digest: str) -> bool:
        return digest in self._found

    def forget(self) -> None:
        with self._lock:
            self._found.clear()


class ImageInputs:
    """`Inputs` of an image-text model."""

    def __init__(
        self,
        model: Any,
        processor: Any,
        kind: Llava | Qwen,
        *,
        sees: bool = True,
        trained: bool = False,
    ) -> None:
        """processor: transformers' image processor of the model. sees: whether requests may have
        images. trained: whether its tower learns."""
        self.model, self.kind, self.processor, self.trained = model, kind, processor, trained
        self.sees = sees
        self.catalogue = catalogue_of(processor, kind)
        self.budget = 2**14  # patches that the tower encodes at once
        self.learned = Embeddings(shared=not trained)  # of the learner's weights
        self.served = Embeddings(shared=False) if trained else self.learned  # of the engine's
        self.source: FileSource | None = None  # of images that requests name by digest
        # During a training step of a trained tower: leaves whose gradients go on into it.
        self.leaves: dict[str, Tensor] = {}
        for part in kind.unused if trained else kind.towers:
            part.requires_grad_(False)

    @property
    def learner(self) -> Any:
        from agentrl.vision.learner import SeeingLearner

        return SeeingLearner

    @property
    def decoder(self) -> Module:
        decoder: Module = self.model.model.language_model
        return decoder

    def keeps(self, digest: str) -> bool:
        """Whether the learner needs the file of an image no more."""
        return not self.trained and digest in self.learned

    def encode(self, images: Sequence[Seen]) -> list[Tensor]:
        """Visual embeddings of images, which have a graph if gradients are enabled."""
        return self.kind.features([self.catalogue.pixels(seen.digest) for seen in images])

    def of_pack(self, pack: Pack) -> tuple[Module, dict[str, Any]]:
        ids = pack.tokens.numpy()
        images = self.catalogue.of(-1 - ids[ids < 0])
        kept = [seen for seen in images if seen.digest not in self.leaves]
        found = dict(zip((seen.digest for seen in kept), self.learned.of(self, kept), strict=True))
        found |= self.leaves
        inputs = self._embedded(ids, images, [found[seen.digest] for seen in images])
        places = torch.from_numpy(positions(ids, images, pack.end.numpy()))
        inputs["position_ids"] = (places[:, None] if len(places) > 1 else places).to(
            self.model.device
        )
        return self.decoder, inputs

    def generate(self, *, input_ids: Tensor, logits_to_keep: int, **options: Any) -> Any:
        ids = input_ids[0].cpu().numpy()
        images = self.catalogue.of(-1 - ids[ids < 0])
        inputs = self._embedded(ids, images, self.served.of(self, images))
        hidden = self.decoder(**inputs, **options).last_hidden_state
        head = self.model.get_output_embeddings()
        return SimpleNamespace(logits=head(hidden[:, -logits_to_keep:]))

    def changed(self) -> None:
        if self.trained:
            self.served.forget()

    def save(self, directory: Path) -> None:
        self.processor.save_pretrained(directory)

    def chat(self, tokenizer: Any, codec: Codec) -> Chat:
        from agentrl.vision.chat import SeeingChat

        if not self.sees:
            return Chat(tokenizer, codec)
        return SeeingChat(tokenizer, codec, self)

    def _embedded(
        self, ids: Ids, images: Sequence[Seen], features: Sequence[Tensor]
    ) -> dict[str, Any]:
        """The decoder's embeddings [1, T, H] of ids. features: of images, in their order."""
        device = self.model.device
        text = torch.from_numpy(np.maximum(ids, 0).astype(np.int64)).to(device)
        embeds = self.model.get_input_embeddings()(text)[None]
        if not images:
            return {"inputs_embeds": embeds}
        rows = torch.cat(list(features))[rows_of(ids, images).to(device)].to(embeds.dtype)
        visual = torch.from_numpy(ids < 0).to(device)[None]
        found, *deep = torch.split(rows, embeds.shape[-1], -1)
        inputs: dict[str, Any] = {"inputs_embeds": embeds.index_put((visual,), found)}
        if deep:
            inputs |= {"visual_pos_masks": visual, "deepstack_visual_embeds": deep}
        return inputs


_catalogues: dict[str, Catalogue] = {}


def catalogue_of(processor: Any, kind: Llava | Qwen) -> Catalogue:
    """The catalogue of all models of a process that see images in the same way, so that a reference
    reads the ids of its policy."""
    written = json.loads(processor.to_json_string())
    settings = {key: x for key, x in written.items() if key not in NAMES and x is not None}
    name = type(processor).__name__
    key = f"{name} {json.dumps(settings, sort_keys=True)} {kind.counts}"
    if key not in _catalogues:

        def process(image: Image) -> Pixels:
            return dict(processor(images=[image], return_tensors="pt"))

        _catalogues[key] = Catalogue(process, kind.shape)
    return _catalogues[key]


def chunks(images: Sequence[Seen], budget: int) -> Iterator[list[Seen]]:
    """Split images into parts of at most `budget` patches, or a single image."""
    part: list[Seen] = []
    for seen in images:
        if part and sum(each.patches for each in part) + seen.patches > budget:
            yield part
            part = []
        part.append(seen)
    if part:
        yield part


def _bytes(x: Tensor) -> int:
    return x.numel() * x.element_size()
