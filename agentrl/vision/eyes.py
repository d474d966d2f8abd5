"""How an image-text model reads the ids of images (`model.inputs`).

Owns the visual embeddings of a model. Always true: an image is encoded once for a set of weights of
the tower, as long as its embeddings are kept; those of a frozen tower are kept over steps, and
shared by the learner and the engine. Embeddings go into the text decoder, so packing, the KV cache
and the head are those of text.
"""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import cache
from hashlib import sha256
from io import BytesIO
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import Module
from transformers.conversion_mapping import get_model_conversion_mapping

from agentrl.algorithms.model.chat import Chat, RequestError
from agentrl.algorithms.model.inputs import inputs_of
from agentrl.algorithms.model.packing import Pack
from agentrl.algorithms.model.text import Codec
from agentrl.base.images import KIND, data_url
from agentrl.errors import PolicyError
from agentrl.types import Image as StoredImage
from agentrl.types import Json
from agentrl.vision.classes import Llava, Qwen
from agentrl.vision.images import (
    Catalogue,
    Ids,
    ImageError,
    Pixels,
    Recent,
    Seen,
    placed,
    positions,
    rows_of,
)

if TYPE_CHECKING:
    from PIL.Image import Image

    from agentrl.store.base import Store
    from agentrl.types import Transition

NAMES = ("_processor_class", "processor_class", "image_processor_type", "_name_or_path")
QUESTION, PROBE_SIZE = "What is this? ", (60, 44)
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
        name_as_hub(model)

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
        (directory / "processor_config.json").write_text(json.dumps(self.kind.processor))

    def chat(self, tokenizer: Any, codec: Codec) -> Chat:
        from agentrl.vision.chat import SeeingChat

        if not self.sees:
            return Chat(tokenizer, codec)
        return SeeingChat(tokenizer, codec, self)

    async def fetch(self, store: Store, run: str, calls: Iterable[Transition]) -> None:
        named = dict.fromkeys(digest for call in calls for digest in call.images)
        wanted = [digest for digest in named if not self.keeps(digest)]
        files = await files_of(store, run, wanted)
        self.catalogue.need(files)
        for digest, body in files.items():
            if self.catalogue.find(digest) is None:
                with suppress(ImageError):  # what names it is not trained, and says why
                    await asyncio.to_thread(self.catalogue.add, body, digest)

    def check(self, other: Module) -> str:
        theirs = inputs_of(other)
        if isinstance(theirs, ImageInputs) and theirs.catalogue is self.catalogue:
            return ""
        return (
            "it does not read images as the policy does; choose a model of the same class with the "
            "same preprocessor_config.json"
        )

    def probe(self) -> list[dict[str, Json]]:
        if not self.sees:
            return []
        picture = _picture()
        self.catalogue.add(picture.body)
        shown: Json = {"type": KIND, KIND: {"url": data_url(picture)}}
        parts: Json = [{"type": "text", "text": QUESTION}, shown]
        return [{"role": "user", "content": parts}]

    def prompt(self, tokenizer: Any) -> list[int]:
        from agentrl.vision.chat import SeeingChat

        if not self.sees:
            return []
        messages = self.probe()
        try:
            rendered = SeeingChat(tokenizer, Codec(tokenizer), self).encode(messages)
            return self.read(rendered, messages)
        except RequestError as error:
            raise PolicyError(f"policy.vision: {error}") from None

    def read(self, prompt: Sequence[int], messages: Sequence[dict[str, Json]]) -> list[int]:
        from agentrl.vision.chat import image_files

        tokens = np.array(prompt, np.int32)
        own = np.flatnonzero(tokens == int(self.model.config.image_token_id))
        try:
            images = [self.catalogue.add(body) for body in image_files(messages)]
            found: list[int] = placed(tokens, own, images).tolist()
        except ImageError as error:
            raise PolicyError(f"the policy server sees images otherwise: {error}") from None
        return found

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


async def files_of(store: Store, run: str, digests: Sequence[str]) -> dict[str, bytes]:
    """The files of stored images by digest."""
    found = await store.images(run, digests) if digests else {}
    return {digest: image.body for digest, image in found.items()}


def name_as_hub(model: Any) -> None:
    """Let a model be saved with the names that checkpoints of the hub have, which vLLM reads: else
    transformers leaves out the prefixes of towers that its own file did not have."""
    from transformers.core_model_loading import PrefixChange  # older ones, refused, have none

    every = get_model_conversion_mapping(model, add_legacy=False)
    own = getattr(model, "_weight_conversions", None)
    if own is None:  # built here: as transformers would choose
        own = [each for each in every if not isinstance(each, PrefixChange)]
    of_towers = [each for each in every if isinstance(each, PrefixChange) and each.scope_prefix]
    known = {each.scope_prefix for each in own if isinstance(each, PrefixChange)}
    model._weight_conversions = own + [each for each in of_towers if each.scope_prefix not in known]


@cache
def _picture() -> StoredImage:
    """A picture with which other sizes, channels, directions or resampling give other values."""
    from PIL import Image

    wide, high = PROBE_SIZE
    red, green = np.meshgrid(np.linspace(0, 255, wide), np.linspace(255, 0, high))
    blue = 255 * (np.add.outer(np.arange(high), np.arange(wide)) % 7 < 3)
    file = BytesIO()
    pixels = np.stack([red, green, blue], -1).astype(np.uint8)
    Image.fromarray(pixels).save(file, "PNG")
    body = file.getvalue()
    return StoredImage(sha256(body).hexdigest(), "image/png", wide, high, body)


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
