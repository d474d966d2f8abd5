"""Images of imported rows: files in data URLs of messages, or in a column `images`, for which parts
of type "image" stand, as in TRL. Stored messages name them by their digests."""

from __future__ import annotations

from base64 import b64encode
from io import BytesIO
from typing import Any

from agentrl.base.image_files import ImageRefusedError, read_image
from agentrl.base.images import KIND, SCHEME, url_of
from agentrl.config.agents import ImagesConfig
from agentrl.errors import ConfigError
from agentrl.types import Image

Row = dict[str, Any]
COLUMNS = ("images", "image")
ASKED = ("prompt", "context", "messages", "conversations")  # columns with the first images
SAID = ("chosen", "rejected", "completion")  # each goes on after those
LIMITS = ImagesConfig()


def with_digests(row: Row) -> tuple[Row, list[Image]]:
    """The row with the digests of its images in its messages, and the images. Raises ConfigError
    for an image that no policy can see, and for more or fewer images than parts."""
    files = _files(row)
    talks = {key: row[key] for key in (*ASKED, *SAID) if isinstance(row.get(key), list | dict)}
    if files and not any(_is_gap(part) for talk in talks.values() for part in _parts(talk)):
        talks = _shown_first(row, len(files))
    found: dict[str, Image] = {}
    used = start = 0  # images used by the column, and by those before the answers
    for key in (key for key in (*ASKED, *SAID) if key in talks):
        at = start if key in SAID else used
        talks[key], at = _named(talks[key], key, files, at, found)
        used = max(used, at)
        start = start if key in SAID else at
    if used != len(files):
        raise ConfigError(
            f"{len(files)} images, and {used} parts of type 'image' in the messages: give one for "
            "each"
        )
    own = {key: x for key, x in row.items() if not (files and key in COLUMNS)}
    return own | talks, list(found.values())


def _named(
    talk: Any, where: str, files: list[str], at: int, found: dict[str, Image]
) -> tuple[Any, int]:
    """A column with digests, and the number of files used so far."""

    def part(given: Any, place: str) -> Any:
        nonlocal at
        if _is_gap(given):
            at += 1
            url = files[at - 1] if at <= len(files) else ""
            if not url:
                raise ConfigError(f"{place} is an image, and the row has {len(files)} images")
            given = {"type": KIND, KIND: {"url": url}}
        if url_of(given) is None:
            return given
        try:
            image = read_image(given, max_bytes=LIMITS.max_bytes, max_pixels=LIMITS.max_pixels)
        except ImageRefusedError as error:
            raise ConfigError(f"{place} is an image that cannot be seen: {error}") from None
        found[image.digest] = image
        about = given[KIND] if isinstance(given[KIND], dict) else {}
        return {"type": KIND, KIND: {**about, "url": SCHEME + image.digest}}

    said = []
    for number, message in enumerate([talk] if isinstance(talk, dict) else talk):
        content = message.get("content") if isinstance(message, dict) else None
        if isinstance(content, list):
            place = f"{where}[{number}].content"
            parts = [part(given, f"{place}[{index}]") for index, given in enumerate(content)]
            message = {**message, "content": parts}
        said.append(message)
    return said[0] if isinstance(talk, dict) else said, at


def _is_gap(part: Any) -> bool:
    """Whether a part stands for the next image of the row."""
    return isinstance(part, dict) and part.get("type") == "image"


def _parts(talk: Any) -> list[Any]:
    messages = [talk] if isinstance(talk, dict) else talk
    contents = (one.get("content") for one in messages if isinstance(one, dict))
    return [part for content in contents if isinstance(content, list) for part in content]


def _shown_first(row: Row, count: int) -> dict[str, Any]:
    """The columns of messages with all images before the first text of a user, as TRL has them."""
    gaps: list[Any] = [{"type": "image"}] * count
    asked = next((key for key in ASKED if row.get(key)), None)
    talks = {key: row[key] for key in (*ASKED, *SAID) if isinstance(row.get(key), list | dict)}
    for key in [asked] if asked else [key for key in SAID if key in talks]:
        talk = row[key]
        if isinstance(talk, str):
            talks[key] = [{"role": "user", "content": [*gaps, {"type": "text", "text": talk}]}]
            continue
        messages = [dict(one) for one in ([talk] if isinstance(talk, dict) else talk)]
        first = next((one for one in messages if one.get("role") == "user"), None)
        if first is not None:
            text = first.get("content")
            parts = text if isinstance(text, list) else [{"type": "text", "text": text or ""}]
            first["content"] = [*gaps, *parts]
        talks[key] = messages
    return talks


def _files(row: Row) -> list[str]:
    """The images of a row's own column, as data URLs."""
    own = next((row[key] for key in COLUMNS if row.get(key) is not None), None)
    given: list[Any] = own if isinstance(own, list) else [] if own is None else [own]
    return [_url(one) for one in given]


def _url(given: Any) -> str:
    body: Any = given.get("bytes") if isinstance(given, dict) else given
    if hasattr(body, "save"):  # a decoded image of `datasets`
        file = BytesIO()
        body.save(file, "PNG")
        body = file.getvalue()
    if isinstance(body, bytes):
        return f"data:image/png;base64,{b64encode(body).decode()}"  # the type is read from the file
    if isinstance(body, str) and body.startswith("data:"):
        return body
    raise ConfigError(
        f"images: {given!r:.80} is no image; give the bytes of its file, or leave the column out"
    )
