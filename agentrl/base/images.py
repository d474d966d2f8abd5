"""Images in stored messages, which name them by the digests of their files."""

from __future__ import annotations

from base64 import b64encode
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from agentrl.types import Image, Json

SCHEME = "image:"  # of the URL of a stored image, before its digest
KIND = "image_url"  # type of a part that is an image
LOST = "[image that is no longer stored: a prune has removed it]"
LONGEST_URL = 60  # characters of an address that is shown
Messages = Iterable[dict[str, Json]]


def data_url(image: Image) -> str:
    return f"data:{image.media_type};base64,{b64encode(image.body).decode()}"


def describe(image: Image | None) -> str:
    """An image in words: [image 1280x800 png 243 kB]. None: it is no longer stored."""
    if image is None:
        return LOST
    size, kind = len(image.body), image.media_type.removeprefix("image/")
    words = f"{size / 1e6:.1f} MB" if size >= 1e6 else f"{size / 1e3:.0f} kB"
    shown = words if size >= 1e3 else f"{size} B"
    return f"[image {image.width}x{image.height} {kind} {shown}]"


def url_of(part: Json) -> str | None:
    """The URL of a part of a message that is an image, empty if it has none; None for others."""
    if not isinstance(part, dict) or part.get("type") != KIND:
        return None
    about: Any = part.get(KIND)
    url = about.get("url") if isinstance(about, dict) else about
    return url if isinstance(url, str) else ""


def digest_of(part: Json) -> str:
    """The digest of the stored image that a part of a message is; empty for other parts."""
    url = url_of(part) or ""
    return url.removeprefix(SCHEME) if url.startswith(SCHEME) else ""


def digests(messages: Messages) -> tuple[str, ...]:
    """The digests of the images that messages show, in order."""
    contents = (message.get("content") for message in messages)
    parts = (part for content in contents if isinstance(content, list) for part in content)
    return tuple(digest for part in parts if (digest := digest_of(part)))


def in_words(part: Json, images: Mapping[str, Image]) -> Json:
    """A part of a message as text, if it is text or an image."""
    if digest := digest_of(part):
        return describe(images.get(digest))
    if url := url_of(part):
        return f"[image, not stored: {url[:LONGEST_URL]}{'...' if len(url) > LONGEST_URL else ''}]"
    text = part.get("text") if isinstance(part, dict) else None
    return part if text is None else text


def described(messages: Messages, images: Mapping[str, Image]) -> list[dict[str, Json]]:
    """Messages for a person, where text and images are one text."""

    def content(parts: list[Json]) -> Json:
        words = [in_words(part, images) for part in parts]
        return " ".join(words) if all(isinstance(one, str) for one in words) else words

    return _changed(messages, content)


def with_data_urls(messages: Messages, images: Mapping[str, Image]) -> list[dict[str, Json]]:
    """Messages with the files of images instead of their digests, as an agent sends them; images
    that are not given keep their names."""

    def part(given: Json) -> Json:
        image = images.get(digest_of(given))
        if image is None:
            return given
        about = given[KIND] if isinstance(given[KIND], dict) else {}
        return {**given, KIND: {**about, "url": data_url(image)}}

    return _changed(messages, lambda parts: [part(one) for one in parts])


def _changed(messages: Messages, change: Callable[[list[Json]], Json]) -> list[dict[str, Json]]:
    """Messages whose content is a list of parts with another content."""
    found = ((message, message.get("content")) for message in messages)
    return [{**one, "content": change(x)} if isinstance(x, list) else one for one, x in found]
