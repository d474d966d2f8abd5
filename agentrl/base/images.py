"""Images in stored messages, which name them by the digests of their files."""

from __future__ import annotations

from base64 import b64encode
from collections.abc import Mapping, Sequence
from typing import Any

from agentrl.types import Image, Json

SCHEME = "image:"  # of the URL of a stored image, before its digest
KIND = "image_url"  # type of a part that is an image


def data_url(image: Image) -> str:
    return f"data:{image.media_type};base64,{b64encode(image.body).decode()}"


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
    about: Any = part.get(KIND) if isinstance(part, dict) else None
    url = about.get("url") if isinstance(about, dict) else None
    if not isinstance(url, str) or not url.startswith(SCHEME):
        return part
    image = images.get(url.removeprefix(SCHEME))
    return part if image is None else {**part, KIND: {**about, "url": data_url(image)}}
