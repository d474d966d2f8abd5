"""What the store and calls have of images, until they have it in their types."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from agentrl.types import Transition


def images_of(call: Transition) -> tuple[str, ...]:
    """Digests of the images in a call's prompt, in order."""
    found: tuple[str, ...] = getattr(call, "images", ())
    return found


async def stored_images(store: Any, run: str, digests: Sequence[str]) -> dict[str, bytes]:
    """The files of images by digest, without those that are not stored."""
    found = await store.images(run, digests) if digests and hasattr(store, "images") else {}
    return {digest: image.body for digest, image in found.items()}
