"""Images in stored messages, which name them by the digests of their files."""

from __future__ import annotations

from base64 import b64encode
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from agentrl.types import Image, Json

SCHEME = "image:"  # of the URL of a stored image, before its digest
KIND = "image_url"  # type of a part that is an image
PRUNED = "[image that is no longer stored: a prune has removed it]"
LONGEST_URL = 60  # characters of an address that is shown


def data_url(image: Image) -> str:
    return f"data:{image.media_type};base64,{b64encode(image.body).decode()}"


def describe(image: Image | None) -> str:
    """An image in words: [image 1280x800 png 243 kB]. None: it is no longer stored."""
    if image is None:
        return PRUNED
    size, unit = float(len(image.body)), "B"
    for larger in ("kB", "MB"):
        if size >= 999.5:
            size, unit = size / 1000, larger
    kind = image.media_type.removeprefix("image/")
    size_shown = f"{size:.1f}" if unit == "MB" and size < 10 else f"{size:.0f}"
    return f"[image {image.width}x{image.height} {kind} {size_shown} {unit}]"


def url_of(part: Json) -> str | None:
    """The URL of a part of a message that is an image, empty if it has none; None for others."""
    if not isinstance(part, dict) or part.get("type") != KIND:
        return None
    about: Any = part.get(KIND)
    url = about.get("url") if isinstance(about, dict) else about
    return url if isinstance(url, str) else ""


def in_words(part: Json, images: Mapping[str, Image]) -> str | None:
    """A part of a message as text; None for one that is neither text nor an image."""
    if isinstance(part, str):
        return part
    url = url_of(part)
    if url is None:
        text = part.get("text") if isinstance(part, dict) else None
        return text if isinstance(text, str) else None
    if url.startswith(SCHEME):
        return describe(images.get(url.removeprefix(SCHEME)))
    return f"[image, not stored: {url[:LONGEST_URL]}{'...' if len(url) > LONGEST_URL else ''}]"


def digests(messages: Iterable[Mapping[str, Json]]) -> tuple[str, ...]:
    """Return the digests of the images that messages show, in order."""
    contents = (message.get("content") for message in messages)
    parts = (part for content in contents if isinstance(content, list) for part in content)
    urls = (url_of(part) or "" for part in parts)
    return tuple(url.removeprefix(SCHEME) for url in urls if url.startswith(SCHEME))


def with_data_urls(
    messages: Sequence[dict[str, Json]], images: Mapping[str, Image]
) -> list[dict[str, Json]]:
    """Return messages with the files of images instead of their digests, as an agent sends them;
    images that are not given keep their names."""
    return [_with_data_urls(message, images) for message in messages]


def _with_data_urls(message: dict[str, Json], images: Mapping[str, Image]) -> dict[str, Json]:
    content = message.get("content")
    if not isinstance(content, list):
        return message
    return {**message, "content": [_with_data_url(part, images) for part in content]}


def _with_data_url(part: Json, images: Mapping[str, Image]) -> Json:
    url = url_of(part) or ""
    image = images.get(url.removeprefix(SCHEME)) if url.startswith(SCHEME) else None
    if image is None:
        return part
    about = part[KIND] if isinstance(part[KIND], dict) else {}
    return {**part, KIND: {**about, "url": data_url(image)}}
