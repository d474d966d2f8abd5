"""The inputs of image-text models: the classes that can be policies, by `model_type`; how a model
reads the ids of images; and requests with images as prompts.

`ImageInputs` owns the visual embeddings of a model. Invariant: an image is encoded once per set of
tower weights, as long as its embeddings are cached; embeddings of a frozen tower are cached over
steps, and shared by the learner and the engine. Embeddings are inputs of the text decoder, so
packing, the KV cache and the head are those of text. The template writes one placeholder per image,
which is repeated once per visual embedding. A placeholder in the text of a message, such as one
that the policy sampled, is text: it is replaced by a mark while the template renders.
"""

from __future__ import annotations

import asyncio
import base64
import binascii
import json
import re
import threading
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cache, lru_cache
from hashlib import sha256
from io import BytesIO
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import jinja2
import msgspec
import numpy as np
import torch
import transformers
from packaging.version import Version
from torch import Tensor
from torch.nn import Module
from transformers.conversion_mapping import get_model_conversion_mapping

from agentrl.algorithms.model.chat import (
    Chat,
    Codec,
    RequestError,
    Tokenizer,
    WrittenArguments,
    template_message,
    text_content,
)
from agentrl.algorithms.model.packing import Pack
from agentrl.algorithms.model.scaled import ReadPrompt, inputs_of
from agentrl.algorithms.vision.images import (
    Catalogue,
    CatalogueImage,
    Ids,
    ImageError,
    Pixels,
    Recent,
    ids_of,
    placed,
    positions,
    rows_of,
)
from agentrl.core.errors import PolicyError, install_command
from agentrl.core.images import KIND, SCHEME, data_url, url_of
from agentrl.core.types import Image as StoredImage
from agentrl.core.types import Json

if TYPE_CHECKING:
    from PIL.Image import Image

    from agentrl.core.types import Transition
    from agentrl.store.base import Store


# Older releases compute wrong embeddings or positions of images in Qwen's classes.
MIN_TRANSFORMERS = "5.10"  # transformers, as in the extra `vision`


def check_version(what: str) -> None:
    """Raise PolicyError about `what` if transformers cannot compute image-text models."""
    if Version(transformers.__version__) < Version(MIN_TRANSFORMERS):
        raise PolicyError(
            f"{what}: image-text models need transformers {MIN_TRANSFORMERS} or newer, not "
            f"{transformers.__version__}; {install_command('vision', ' -U')}"
        )


@lru_cache(256)  # screenshots have the same size, and there may be millions
def _places(*grid: int) -> Ids:
    """The places of a grid's cells, int64 [axes, cells]; cached, not to be changed."""
    places = np.indices(grid).reshape(len(grid), -1)
    places.flags.writeable = False
    return places


@dataclass(frozen=True, slots=True)
class Llava:
    """CLIP's patches through a projector; ordinary positions."""

    network: Any  # `LlavaForConditionalGeneration`

    @property
    def towers(self) -> tuple[Module, ...]:
        """The modules that only compute visual embeddings."""
        return self.network.model.vision_tower, self.network.model.multi_modal_projector

    @property
    def unused(self) -> tuple[Module, ...]:
        """Modules that visual embeddings do not depend on, so they get no gradient."""
        clip, chosen = self.network.model.vision_tower, self.network.config.vision_feature_layer
        clip = getattr(clip, "vision_model", clip)
        size = len(clip.encoder.layers)
        last = max(
            layer % (size + 1) for layer in ([chosen] if isinstance(chosen, int) else chosen)
        )
        return (clip.post_layernorm, *clip.encoder.layers[last:])

    @property
    def processor(self) -> dict[str, object]:
        """The content of processor_config.json, without the image processor's file; other libraries
        use it to expand placeholders."""
        config = self.network.config
        return {
            "processor_class": "LlavaProcessor",
            "patch_size": config.vision_config.patch_size,
            "vision_feature_select_strategy": config.vision_feature_select_strategy,
            "num_additional_image_tokens": 1,  # CLIP's first
        }

    @property
    def counts(self) -> tuple[object, ...]:
        """What `shape` depends on besides the pixels."""
        config = self.network.config
        return "llava", config.vision_config.patch_size, config.vision_feature_select_strategy

    def shape(self, pixels: Pixels) -> tuple[int, int, Ids, int]:
        """Visual embeddings, patches, their places and extent, as in `CatalogueImage`."""
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
        output = self.network.model.get_image_features(
            pixel_values=torch.cat([values["pixel_values"] for values in pixels]).to(weight),
            vision_feature_layer=config.vision_feature_layer,
            vision_feature_select_strategy=config.vision_feature_select_strategy,
        )
        return list(output.pooler_output)


@dataclass(frozen=True, slots=True)
class Qwen:
    """Qwen2.5-VL and Qwen3-VL: any size, three rotary axes, and in Qwen3-VL embeddings for deeper
    layers too, next to each other."""

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
            pixel_values=torch.cat([values["pixel_values"] for values in pixels]).to(device),
            image_grid_thw=torch.cat([values["image_grid_thw"] for values in pixels]).to(device),
        )
        embeddings = list(output.pooler_output)
        if deep := getattr(output, "deepstack_features", None):
            sizes = [len(values) for values in embeddings]
            # since transformers 5.18 they are a list by image, like the others
            split = (torch.split(x, sizes) if isinstance(x, Tensor) else x for x in deep)
            parts = zip(embeddings, *split, strict=True)
            embeddings = [torch.cat(values, -1) for values in parts]
        return embeddings


PROCESSORS = {"qwen2_5_vl": "Qwen2_5_VLProcessor", "qwen3_vl": "Qwen3VLProcessor"}
CLASSES: dict[str, type[Llava] | type[Qwen]] = {
    "llava": Llava,
    "qwen2_5_vl": Qwen,
    "qwen3_vl": Qwen,
}
# model_type -> why it is not supported, as the end of a sentence.
REASONS = {
    "gemma3": "in which the tokens of an image attend to each other in both directions",
    "gemma3n": "in which the tokens of an image attend to each other in both directions",
    "gemma4": "in which the tokens of an image attend to each other in both directions",
    "paligemma": "in which a prompt attends in both directions",
    "qwen3_5": "with layers of linear attention, along whose branches nothing can be packed",
    "qwen3_5_moe": "with layers of linear attention, along whose branches nothing can be packed",
    "mllama": "in which text attends to images by cross-attention, not among its own tokens",
}


NAMES = ("_processor_class", "processor_class", "image_processor_type", "_name_or_path")
QUESTION, PROBE_SIZE = "What is this? ", (60, 44)
EMBEDDING_BYTES = 2**30  # bytes of cached visual embeddings


FileSource = Callable[[Sequence[str]], Awaitable[Mapping[str, bytes]]]
"""Returns the files of images by digest, without those that it does not have."""


class Embeddings:
    """Visual embeddings of images, without a graph. Thread-safe. shared: by copies of the model,
    because its tower does not change."""

    def __init__(self, *, shared: bool) -> None:
        self._shared = shared
        self._cache = Recent(_bytes)
        self._lock = threading.RLock()
        self.encoded = 0  # images encoded so far

    def __deepcopy__(self, memo: object) -> Embeddings:
        return self if self._shared else Embeddings(shared=False)

    def of(self, encoder: ImageInputs, images: Sequence[CatalogueImage]) -> list[Tensor]:
        with self._lock:
            missing = [image for image in images if image.digest not in self._cache]
            # Outside of the engine's inference mode, because autograd cannot use its tensors.
            with torch.inference_mode(False), torch.no_grad():
                for chunk in chunks(missing, encoder.budget):
                    for image, embeddings in zip(chunk, encoder.encode(chunk), strict=True):
                        self._cache.put(image.digest, embeddings)
            self.encoded += len(missing)
            embeddings_of_images = [self._cache.use(image.digest) for image in images]
            self._cache.shrink(EMBEDDING_BYTES, {image.digest for image in images})
            return embeddings_of_images

    def __contains__(self, digest: str) -> bool:
        return digest in self._cache

    def forget(self) -> None:
        with self._lock:
            self._cache.clear()


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
        self.budget = 2**14  # patches per pass of the tower
        self.learned = Embeddings(shared=not trained)  # embeddings by the learner's weights
        # Embeddings by the engine's weights.
        self.served = Embeddings(shared=False) if trained else self.learned
        self.source: FileSource | None = None  # reads images that requests name by digest
        # During a training step of a trained tower: leaves whose gradients are propagated into it.
        self.leaves: dict[str, Tensor] = {}
        for part in kind.unused if trained else kind.towers:
            part.requires_grad_(False)
        name_as_hub(model)

    @property
    def decoder(self) -> Module:
        decoder: Module = self.model.model.language_model
        return decoder

    def keeps(self, digest: str) -> bool:
        """Whether the learner no longer needs the file of an image."""
        return not self.trained and digest in self.learned

    def encode(self, images: Sequence[CatalogueImage]) -> list[Tensor]:
        """Visual embeddings of images, which have a graph if gradients are enabled."""
        return self.kind.features([self.catalogue.pixels(image.digest) for image in images])

    def of_pack(self, pack: Pack) -> tuple[Module, dict[str, Any]]:
        ids = pack.tokens.numpy()
        images = self.catalogue.of(-1 - ids[ids < 0])
        cached = [image for image in images if image.digest not in self.leaves]
        embeddings = dict(
            zip((image.digest for image in cached), self.learned.of(self, cached), strict=True)
        )
        embeddings |= self.leaves
        inputs = self._embedded(ids, images, [embeddings[image.digest] for image in images])
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
        if not self.sees:
            return Chat(tokenizer, codec)
        return ImageTextChat(tokenizer, codec, self)

    async def fetch(self, store: Store, run: str, calls: Iterable[Transition]) -> None:
        named = dict.fromkeys(digest for call in calls for digest in call.images)
        needed = [digest for digest in named if not self.keeps(digest)]
        files = await files_of(store, run, needed)
        self.catalogue.need(files)
        for digest, body in files.items():
            if self.catalogue.find(digest) is None:
                # Calls with this image are not trained, for a stated reason.
                with suppress(ImageError):
                    await asyncio.to_thread(self.catalogue.add, body, digest)

    def check(self, model: Module) -> str:
        other_inputs = inputs_of(model)
        if isinstance(other_inputs, ImageInputs) and other_inputs.catalogue is self.catalogue:
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
        if not self.sees:
            return []
        messages = self.probe()
        try:
            rendered = ImageTextChat(tokenizer, Codec(tokenizer), self).encode(messages)
            return self.read(rendered, messages)
        except RequestError as error:
            raise PolicyError(f"policy.vision: {error}") from None

    def read(self, prompt: Sequence[int], messages: Sequence[dict[str, Json]]) -> list[int]:
        tokens = np.array(prompt, np.int32)
        placeholders = np.flatnonzero(tokens == int(self.model.config.image_token_id))
        try:
            images = [self.catalogue.add(body) for body in image_files(messages)]
            ids: list[int] = placed(tokens, placeholders, images).tolist()
        except ImageError as error:
            raise PolicyError(f"the policy server reads images differently: {error}") from None
        return ids

    def _embedded(
        self, ids: Ids, images: Sequence[CatalogueImage], features: Sequence[Tensor]
    ) -> dict[str, Any]:
        """The decoder's embeddings [1, T, H] of ids. features: of images, in their order."""
        device = self.model.device
        text = torch.from_numpy(np.maximum(ids, 0).astype(np.int64)).to(device)
        embeds = self.model.get_input_embeddings()(text)[None]
        if not images:
            return {"inputs_embeds": embeds}
        rows = torch.cat(list(features))[rows_of(ids, images).to(device)].to(embeds.dtype)
        visual = torch.from_numpy(ids < 0).to(device)[None]
        first_layer, *deep = torch.split(rows, embeds.shape[-1], -1)
        inputs: dict[str, Any] = {"inputs_embeds": embeds.index_put((visual,), first_layer)}
        if deep:
            inputs |= {"visual_pos_masks": visual, "deepstack_visual_embeds": deep}
        return inputs


async def files_of(store: Store, run: str, digests: Sequence[str]) -> dict[str, bytes]:
    """The files of stored images by digest."""
    images = await store.images(run, digests) if digests else {}
    return {digest: image.body for digest, image in images.items()}


def name_as_hub(model: Any) -> None:
    """Save a model with the weight names of the hub's checkpoints, which vLLM reads; transformers
    would leave out prefixes of towers that were missing in the loaded file."""
    # Unsupported older releases do not have it.
    from transformers.core_model_loading import PrefixChange

    conversions = get_model_conversion_mapping(model, add_legacy=False)
    chosen = getattr(model, "_weight_conversions", None)
    if chosen is None:  # a model that was built here: use transformers' choice
        chosen = [
            conversion for conversion in conversions if not isinstance(conversion, PrefixChange)
        ]
    of_towers = [
        conversion
        for conversion in conversions
        if isinstance(conversion, PrefixChange) and conversion.scope_prefix
    ]
    prefixes = {
        conversion.scope_prefix for conversion in chosen if isinstance(conversion, PrefixChange)
    }
    model._weight_conversions = chosen + [
        conversion for conversion in of_towers if conversion.scope_prefix not in prefixes
    ]


@cache
def _picture() -> StoredImage:
    """A picture whose values change with size, channels, direction or resampling."""
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
    """The catalogue that all models of a process with the same image processing share, so that a
    reference can read the ids of its policy."""
    written = json.loads(processor.to_json_string())
    settings = {key: x for key, x in written.items() if key not in NAMES and x is not None}
    name = type(processor).__name__
    key = f"{name} {json.dumps(settings, sort_keys=True)} {kind.counts}"
    if key not in _catalogues:

        def process(image: Image) -> Pixels:
            return dict(processor(images=[image], return_tensors="pt"))

        _catalogues[key] = Catalogue(process, kind.shape)
    return _catalogues[key]


def chunks(images: Sequence[CatalogueImage], budget: int) -> Iterator[list[CatalogueImage]]:
    """Split images into parts of at most `budget` patches, or a single image."""
    part: list[CatalogueImage] = []
    for image in images:
        if part and sum(queued.patches for queued in part) + image.patches > budget:
            yield part
            part = []
        part.append(image)
    if part:
        yield part


def _bytes(x: Tensor) -> int:
    return x.numel() * x.element_size()


DATA = "data:"  # prefix of a URL that contains the image itself
MARK = "\ufdd0"  # a character that occurs in no text
OTHERS = ("input_audio", "audio_url", "video_url", "video", "file")


class ImageTextChat(Chat):
    """A `Chat` of a policy with `ImageInputs`."""

    text_only = False

    def __init__(self, tokenizer: Tokenizer, codec: Codec, encoder: ImageInputs) -> None:
        super().__init__(tokenizer, codec)
        self._encoder = encoder
        self._id = int(encoder.model.config.image_token_id)
        self._placeholder: str = tokenizer.convert_ids_to_tokens(self._id)
        self._parts = self._wants_parts()

    async def fetch(self, messages: bytes) -> None:
        """Assign ids to the images of a request. Raises RequestError for an image that cannot be
        read."""
        # Images may be large, so they are read outside the event loop.
        catalogue, urls = self._encoder.catalogue, await asyncio.to_thread(_urls_in, messages)
        named = [url.removeprefix(SCHEME) for url in urls if url.startswith(SCHEME)]
        missing = [digest for digest in named if catalogue.find(digest) is None]
        # A known image may have to be encoded again after its embeddings were dropped.
        dropped = [d for d in named if d not in self._encoder.served and catalogue.file(d) is None]
        needed = list(dict.fromkeys([*missing, *dropped]))
        files = dict(await self._encoder.source(needed)) if needed and self._encoder.source else {}
        files |= await asyncio.to_thread(_files_in, urls)
        if unknown := [digest for digest in needed if digest not in files]:
            raise RequestError(
                f"image {unknown[0][:12]} is not in the store of this run; send it as a data URL",
                param="messages",
            )
        try:
            for digest, body in files.items():
                await asyncio.to_thread(catalogue.add, body, digest)
        except ImageError as error:
            raise RequestError(str(error), param="messages") from None

    def message(self, message: dict[str, Json], index: int) -> dict[str, Json]:
        converted = template_message(message, index, self._content)
        return {key: x if key == "content" else self._hidden(x) for key, x in converted.items()}

    def tokens(self, text: str, messages: bytes) -> ReadPrompt:
        images = [self._image(url) for url in image_urls(msgspec.json.decode(messages))]
        pieces = text.split(self._placeholder)
        if len(pieces) != len(images) + 1:
            raise RequestError(
                f"the model's chat template renders {len(pieces) - 1} of the request's "
                f"{len(images)} images, so the model would not see them all; send images in the "
                "messages of users, or replace its chat_template.jinja",
                param="messages",
            )
        # In one piece, because the text next to a placeholder affects how a tokenizer splits it.
        tokens, is_from_template = self._marked(text)
        ids, read = list[int](), list[int]()
        remaining, placeholders = iter(images), iter(is_from_template)
        for token in tokens:
            if token == self._id and next(placeholders):
                image = next(remaining)
                ids += [token] * image.size
                read += ids_of(image).tolist()
            else:
                ids.append(token)
                read.append(token)
        prompt = ReadPrompt(ids)
        prompt.read = np.array(read, np.int32)
        if images and len(images[0].places) > 1:
            distinct = sorted(set(images), key=lambda image: image.first)
            prompt.rotary = positions(np.array(read, np.int64), distinct)
        return prompt

    def _marked(self, text: str) -> tuple[list[int], list[bool]]:
        """Token ids of a rendered text, and of each placeholder whether it is the template's."""
        matches = re.findall(f"{MARK}|{re.escape(self._placeholder)}", text)
        is_from_template = [match != MARK for match in matches]
        ids = list(self._codec.encode(text.replace(MARK, self._placeholder)))
        if ids.count(self._id) != len(is_from_template):
            raise RequestError(
                f"the tokenizer does not keep {self._placeholder!r} as one token; put the files of"
                " the model's own tokenizer there"
            )
        return ids, is_from_template

    def _content(self, content: Json, where: str) -> Json:
        """Content for the template: text, or a list of text and image parts."""
        if not isinstance(content, list):
            text: Json = self._hidden(text_content(content, where))
            return [{"type": "text", "text": text}] if self._parts else text
        parts: list[dict[str, Json]] = []
        for part in content:
            kind = part.get("type") if isinstance(part, dict) else None
            if kind == "image_url":
                parts.append({"type": "image"})
                continue
            if kind in OTHERS:
                raise RequestError(
                    f"{where}.content has a part of type {kind!r}: this model reads text and images"
                    " only; leave it out",
                    param="messages",
                )
            parts.append({"type": "text", "text": self._hidden(text_content([part], where))})
        if self._parts or any(part["type"] == "image" for part in parts):
            return parts
        return "".join(str(part["text"]) for part in parts)

    def _hidden(self, value: Json) -> Json:
        """A value with a mark in place of each placeholder in its texts."""
        if isinstance(value, str):
            return value.replace(MARK, "").replace(self._placeholder, MARK)
        if isinstance(value, list):
            return [self._hidden(item) for item in value]
        if not isinstance(value, dict):
            return value
        hidden = {key: self._hidden(item) for key, item in value.items()}
        if isinstance(value, WrittenArguments):
            return WrittenArguments(hidden, str(self._hidden(value.written)))
        return hidden

    def _image(self, url: str) -> CatalogueImage:
        digest = url.removeprefix(SCHEME)
        if body := data_of(url):
            digest = sha256(body).hexdigest()
        image = self._encoder.catalogue.find(digest)
        if image is None:
            raise RequestError(f"image {digest[:12]} was not fetched", param="messages", status=500)
        return image

    def _wants_parts(self) -> bool:
        """Whether the template reads text only as a list of parts, as LLaVA's does."""
        try:
            text = self._tokenizer.apply_chat_template(
                [{"role": "user", "content": "agentrl"}], tokenize=False
            )
        except (jinja2.TemplateError, TypeError, ValueError, LookupError, AttributeError):
            return True
        return "agentrl" not in text


def image_urls(messages: Any) -> list[str]:
    """The URLs of a request's images, in order. Raises RequestError for an unsupported kind."""
    urls: list[str] = []
    for index, message in enumerate(messages if isinstance(messages, list) else []):
        content = message.get("content") if isinstance(message, dict) else None
        for part in content if isinstance(content, list) else []:
            if (url := url_of(part)) is None:
                continue
            if not url.startswith((SCHEME, DATA)):
                raise RequestError(
                    f"messages[{index}] has an image by its address, which is not fetched; "
                    "send it as a data URL",
                    param="messages",
                )
            urls.append(url)
    return urls


def _urls_in(messages: bytes) -> list[str]:
    return image_urls(msgspec.json.decode(messages))


def _files_in(urls: list[str]) -> dict[str, bytes]:
    """The files of data URLs by digest."""
    return {sha256(body).hexdigest(): body for body in map(data_of, urls) if body}


def image_files(messages: Any) -> list[bytes]:
    """The files of the images that messages have as data URLs."""
    return [body for body in map(data_of, image_urls(messages)) if body]


def data_of(url: str) -> bytes:
    """The file in a data URL; empty for other URLs."""
    if not url.startswith(DATA):
        return b""
    head, _, data = url.partition(",")
    try:
        if not head.endswith(";base64") or not data:
            raise ValueError
        return base64.b64decode(data, validate=True)
    except (ValueError, binascii.Error):
        raise RequestError(
            "an image's data URL is not base64; send it as data:image/png;base64,...",
            param="messages",
        ) from None
