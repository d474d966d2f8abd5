"""Images by digest, and the ids of their visual embeddings.

The j-th visual embedding of all images that a process has seen is the token id -1 - j. An image has
its ids for as long as the process lives, so equal ids are equal images everywhere: in batches, the
trie and prefix caches.
"""

from __future__ import annotations

import threading
from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from hashlib import sha256
from io import BytesIO
from typing import TYPE_CHECKING, Any, Generic, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

if TYPE_CHECKING:
    from PIL.Image import Image


Ids = NDArray[np.int64]
Tokens = NDArray[np.int32]
Pixels = Mapping[str, Tensor]  # the output of an image processor for one image
T = TypeVar("T")
MAX_EMBEDDINGS = 2**31  # ids of tokens have 32 bits
MAX_PIXELS = 64 * 2**20  # pixels of an image; larger images are not decoded
PIXEL_BYTES = 512 * 2**20  # bytes of cached pixel values; others are recomputed
FILE_BYTES = 2**30  # bytes of cached files, besides those of the training step


class ImageError(RuntimeError):
    """An image cannot be read. The message is one sentence."""


@dataclass(frozen=True, slots=True, eq=False)
class CatalogueImage:
    """An image as a class of models reads it."""

    digest: str
    first: int  # index of its first visual embedding
    size: int  # visual embeddings, which are placeholders in a prompt
    patches: int  # patches of the vision tower's input
    places: Ids  # int64 [axes, size], rotary positions relative to the first one
    extent: int  # number of rotary positions of the image


class Recent(Generic[T]):
    """A cache of values by digest, with their sizes. Invariant: ordered by last use."""

    def __init__(self, size: Callable[[T], int]) -> None:
        self._values, self._size = OrderedDict[str, T](), size
        self._bytes = 0

    def __contains__(self, digest: str) -> bool:
        return digest in self._values

    def get(self, digest: str) -> T | None:
        return self._values.get(digest)

    def use(self, digest: str) -> T:
        self._values.move_to_end(digest)
        return self._values[digest]

    def put(self, digest: str, value: T) -> None:
        self._drop(digest)
        self._values[digest] = value
        self._bytes += self._size(value)

    def shrink(self, limit: int, keep: Collection[str]) -> None:
        """Drop the least recently used values, except `keep`, until at most `limit` bytes are
        left."""
        while self._bytes > limit:
            first = next((digest for digest in self._values if digest not in keep), None)
            if first is None:
                return
            self._drop(first)

    def clear(self) -> None:
        self._values.clear()
        self._bytes = 0

    def _drop(self, digest: str) -> None:
        if digest in self._values:
            self._bytes -= self._size(self._values.pop(digest))


class Catalogue:
    """All images that a process has seen through one image processor. Thread-safe.

    Invariant: images are numbered in the order in which they were added, without gaps."""

    def __init__(self, process: Callable[[Image], Pixels], shape: Callable[..., Any]) -> None:
        """shape: (pixels) -> (size, patches, places, extent) of `CatalogueImage`."""
        self._process, self._shape = process, shape
        self._by_digest: dict[str, CatalogueImage] = {}
        self._order: list[CatalogueImage] = []
        self._firsts: list[int] = []
        self._files = Recent[bytes](len)
        self._needed: frozenset[str] = frozenset()  # images of the training step
        self._pixels = Recent[Pixels](_bytes)
        self._lock = threading.RLock()
        self.decoded = 0  # images decoded so far

    def __deepcopy__(self, memo: object) -> Catalogue:
        return self

    def __len__(self) -> int:
        """Visual embeddings of all images."""
        last = self._order[-1] if self._order else None
        return last.first + last.size if last else 0

    def need(self, files: Mapping[str, bytes]) -> None:
        """Keep these files until the next call."""
        with self._lock:
            self._needed = frozenset(files)
            for digest, body in files.items():
                self._files.put(digest, body)

    def find(self, digest: str) -> CatalogueImage | None:
        return self._by_digest.get(digest)

    def file(self, digest: str) -> bytes | None:
        return self._files.get(digest)

    def readable(self, digest: str) -> bool:
        """Whether `pixels` has it."""
        return digest in self._files or digest in self._pixels

    def add(self, body: bytes, digest: str = "") -> CatalogueImage:
        """Number an image. Raises ImageError for a file that cannot be read."""
        digest = digest or sha256(body).hexdigest()
        with self._lock:
            self._files.put(digest, body)
            self._files.shrink(FILE_BYTES, self._needed | {digest})
            if digest not in self._by_digest:
                size, patches, places, extent = self._shape(self._read(digest, body))
                if len(self) + size > MAX_EMBEDDINGS:
                    raise ImageError(
                        f"this process has seen images with {len(self)} visual embeddings, the "
                        "most that it can number; start it again to continue from its checkpoint"
                    )
                self._by_digest[digest] = image = CatalogueImage(
                    digest, len(self), size, patches, places, extent
                )
                self._order.append(image)
                self._firsts.append(image.first)
            return self._by_digest[digest]

    def pixels(self, digest: str) -> Pixels:
        """Pixel values of an image with a cached file or cached pixels. Raises ImageError
        for others."""
        with self._lock:
            if digest in self._pixels:
                return self._pixels.use(digest)
            if (body := self._files.get(digest)) is None:
                raise ImageError(f"image {digest[:12]} is no longer in memory; send it again")
            return self._read(digest, body)

    def of(self, indices: Ids) -> list[CatalogueImage]:
        """The images with these visual embeddings, in ascending order, each once."""
        with self._lock:
            numbers = sorted(
                {bisect_right(self._firsts, j) - 1 for j in np.unique(indices).tolist()}
            )
            return [self._order[number] for number in numbers]

    def _read(self, digest: str, body: bytes) -> Pixels:
        image = decode(body)
        try:
            pixels = self._process(image)
        except ValueError as error:  # raised by Qwen's processors for extreme aspect ratios
            raise ImageError(
                f"the model's image processor cannot read an image of {image.width} x "
                f"{image.height} pixels ({error}); send it in other proportions"
            ) from None
        self.decoded += 1
        self._pixels.put(digest, pixels)
        self._pixels.shrink(PIXEL_BYTES, {digest})
        return pixels


def decode(body: bytes) -> Image:
    """An image in RGB: turned by its EXIF, transparent parts over white. Raises ImageError."""
    from PIL import Image, ImageOps

    try:
        file = Image.open(BytesIO(body))
        if file.width * file.height > MAX_PIXELS:
            raise ImageError(
                f"an image has {file.width} x {file.height} pixels, more than {MAX_PIXELS}; "
                "send a smaller one"
            )
        image = ImageOps.exif_transpose(file)
        if image.has_transparency_data:
            rgba = image.convert("RGBA")
            image = Image.new("RGB", image.size, "white")
            image.paste(rgba, mask=rgba.getchannel("A"))  # bitwise equal to vLLM
        return image.convert("RGB")
    except (OSError, ValueError, SyntaxError) as error:
        raise ImageError(f"an image cannot be read ({error}); send a whole PNG or JPEG") from None
    except Image.DecompressionBombError as error:
        raise ImageError(f"an image is too large ({error}); send a smaller one") from None


def ids_of(image: CatalogueImage) -> Ids:
    """The token ids of an image."""
    return -1 - np.arange(image.first, image.first + image.size)


def placed(prompt: Tokens, at: Ids, images: Sequence[CatalogueImage]) -> Tokens:
    """The prompt with the ids of images in place of its placeholders `at`. Raises ImageError if the
    placeholders do not match the images in order."""
    sizes = [image.size for image in images]
    if len(at) != sum(sizes) or any(np.ptp(part) >= len(part) for part in _split(at, sizes)):
        raise ImageError(_mismatch([len(run) for run in _runs(at)], sizes))
    ids = prompt.copy()
    if len(at):
        ids[at] = np.concatenate([ids_of(image) for image in images])
    return ids


def _split(at: Ids, sizes: Sequence[int]) -> Iterator[Ids]:
    yield from (part for part in np.split(at, np.cumsum(sizes)[:-1]) if len(part))


def _runs(at: Ids) -> list[Ids]:
    """The runs of adjacent places."""
    return [run for run in np.split(at, np.flatnonzero(np.diff(at) > 1) + 1) if len(run)]


def _mismatch(runs: Sequence[int], sizes: Sequence[int]) -> str:
    """A sentence: why these runs of placeholders do not match images of these sizes."""
    problem = f"its prompt has {_list(runs)} placeholders for {len(sizes)} images"
    if not runs:
        return (
            f"{problem}: the server's chat template drops the images of such messages; send them in"
            " messages of users, or replace the template"
        )
    if len(runs) > len(sizes):
        return (
            f"{problem}, so the text of a placeholder, which a message has or the policy sampled,"
            " was taken for an image"
        )
    return (
        f"{problem}, for which the model's image processor gives {_list(sizes)}; serve it with the"
        " policy's own preprocessor_config.json, and leave min_pixels, max_pixels and size out of"
        " mm_processor_kwargs"
    )


def _list(numbers: Sequence[int]) -> str:
    shown = ", ".join(map(str, numbers[:4])) or "no"
    return f"{shown} ..." if len(numbers) > 4 else shown


def rotary_steps(ids: Ids, images: Sequence[CatalogueImage]) -> tuple[Ids, Ids]:
    """For each id its position within its image [axes, N], and how far it advances the rotary
    position of the next id [N]: 1 for text; for an image at its last embedding. images: `of` the
    ids."""
    axes = len(images[0].places) if images else 1
    places, steps = np.zeros((axes, len(ids)), np.int64), np.ones(len(ids), np.int64)
    at = np.flatnonzero(ids < 0)
    if len(at):
        index = _local(-1 - ids[at], images)
        places[:, at] = np.concatenate([image.places for image in images], 1)[:, index]
        grow = np.zeros(sum(image.size for image in images), np.int64)
        grow[np.cumsum([image.size for image in images]) - 1] = [image.extent for image in images]
        steps[at] = grow[index]
    return places, steps


def positions(ids: Ids, images: Sequence[CatalogueImage], end: Ids | None = None) -> Ids:
    """Rotary positions [axes, T] of a row of ids, or with `end` of the nodes of a forest (see
    `model.packing`): where its image begins, plus the place within it."""
    places, steps = rotary_steps(ids, images)
    if end is None:
        before = np.cumsum(steps) - steps
    else:
        # The sum over a node's ancestors: each is added at its node and subtracted after its
        # subtree.
        change = np.append(steps, 0)
        np.subtract.at(change, end, steps)
        before = np.cumsum(change)[:-1] - steps
    return before + places


def rows_of(ids: Ids, images: Sequence[CatalogueImage]) -> Tensor:
    """Rows of the ids below 0 in the concatenated embeddings of `images`, int64 [n]."""
    return torch.from_numpy(_local(-1 - ids[ids < 0], images))


def _local(indices: Ids, images: Sequence[CatalogueImage]) -> Ids:
    firsts = np.array([image.first for image in images])
    offsets = np.cumsum([0, *(image.size for image in images[:-1])])
    number = np.searchsorted(firsts, indices, side="right") - 1
    local: Ids = offsets[number] + indices - firsts[number]
    return local


def _bytes(pixels: Pixels) -> int:
    return sum(x.numel() * x.element_size() for x in pixels.values())
