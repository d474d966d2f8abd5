"""Images of calls on pages: what they are, and their files.

A page describes its images, and a browser fetches their files by digest; an exported file has them
inside. Only files that browsers decode and never run are given out."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterable, Sequence
from typing import NamedTuple
from urllib.parse import quote

from agentrl.base.images import PRUNED, describe
from agentrl.errors import NotFound
from agentrl.store.base import Store
from agentrl.types import Image, Transition

TYPES = ("image/png", "image/jpeg", "image/webp", "image/gif")  # that browsers only decode
IMAGES_PER_READ = 16
MOST_KNOWN = 10_000  # pictures whose description is kept
WIDEST, HIGHEST = 320, 208  # pixels of a thumbnail
SMALL, LARGEST_SCALE = 112, 8  # pixels to which small images are enlarged, in whole steps


class Picture(NamedTuple):
    """An image as a page shows it; without an address in words only."""

    label: str  # such as [image 1280x800 png 243 kB]
    digest: str = ""
    address: str = ""
    width: int = 0
    height: int = 0

    @property
    def scale(self) -> float:
        """How much larger its thumbnail is than the image; small images are enlarged."""
        fits = min(WIDEST / max(self.width, 1), HIGHEST / max(self.height, 1))
        return min(fits, max(1, min(LARGEST_SCALE, SMALL // max(self.width, self.height, 1))))


LOST = Picture(PRUNED)


class Album:
    """The images of a store. Keeps what the last ones are, which never changes, not their files."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._known: dict[str, Picture] = {}

    async def of(self, run: str, calls: Iterable[Transition]) -> dict[str, Picture]:
        """The pictures of calls by digest, without those that are no longer stored."""
        wanted = sorted({digest for call in calls for digest in call.images})
        async for image in self.files(run, [d for d in wanted if d not in self._known]):
            while len(self._known) >= MOST_KNOWN:
                del self._known[next(iter(self._known))]
            address = f"/image/{image.digest}?run={quote(run)}" if _is_shown(image) else ""
            self._known[image.digest] = Picture(
                describe(image), image.digest, address, image.width, image.height
            )
        return {digest: self._known[digest] for digest in wanted if digest in self._known}

    async def files(self, run: str, digests: Sequence[str]) -> AsyncIterator[Image]:
        """Yield the images that are stored, a few of them in memory at a time."""
        for first in range(0, len(digests), IMAGES_PER_READ):
            some = digests[first : first + IMAGES_PER_READ]
            found = await self._store.images(run, some)
            for digest in some:
                if digest in found:
                    yield found[digest]

    async def file(self, run: str, digest: str) -> Image:
        """Raises NotFound for an image that is not stored, or that a browser might run."""
        found = (await self._store.images(run, [digest])).get(digest)
        if found is None:
            raise NotFound(f"image {digest} is not stored: a prune has removed it")
        if not _is_shown(found):
            raise NotFound(f"image {digest} is of type {found.media_type}, which is not shown")
        return found


def _is_shown(image: Image) -> bool:
    return image.media_type in TYPES
