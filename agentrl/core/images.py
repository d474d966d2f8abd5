"""Images in messages: stored messages name them by the digests of their files.

Type and size are read from a file's header without decoding: a file of a few kilobytes may decode
to gigabytes, so its size is checked before it is decoded. Also rejected: files that decoders render
differently. These are animations (which frame?), a rotation given only in EXIF, CMYK, greyscale
of 16 bits, and RGB of which one colour is transparent.

Sources: https://www.w3.org/TR/png-3, https://www.w3.org/Graphics/GIF/spec-gif89a.txt,
https://www.w3.org/Graphics/JPEG/itu-t81.pdf, https://www.rfc-editor.org/rfc/rfc9649
"""

from __future__ import annotations

import re
from base64 import b64encode
from collections.abc import Callable, Iterable, Iterator, Mapping
from hashlib import sha256
from struct import error as StructError  # noqa: N812 - an exception, whatever its name
from struct import unpack_from
from typing import Any, NamedTuple

import msgspec

from agentrl.core.types import Image, Json

SCHEME = "image:"  # of the URL of a stored image, before its digest
KIND = "image_url"  # type of a message part that is an image
LOST = "[image that is no longer stored: a prune has removed it]"
MAX_URL_CHARS = 60  # characters shown of an address
Messages = Iterable[dict[str, Json]]


def data_url(image: Image) -> str:
    return f"data:{image.media_type};base64,{b64encode(image.body).decode()}"


def describe(image: Image | None) -> str:
    """A description of an image: [image 1280x800 png 243 kB]. None: the image is no longer
    stored."""
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
    image: Any = part.get(KIND)
    url = image.get("url") if isinstance(image, dict) else image
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
        return (
            f"[image, not stored: {url[:MAX_URL_CHARS]}{'...' if len(url) > MAX_URL_CHARS else ''}]"
        )
    text = part.get("text") if isinstance(part, dict) else None
    return part if text is None else text


def described(messages: Messages, images: Mapping[str, Image]) -> list[dict[str, Json]]:
    """Messages for display, with text and descriptions of images in one string."""

    def content(parts: list[Json]) -> Json:
        words = [in_words(part, images) for part in parts]
        return " ".join(words) if all(isinstance(word, str) for word in words) else words

    return _changed(messages, content)


def with_data_urls(messages: Messages, images: Mapping[str, Image]) -> list[dict[str, Json]]:
    """Messages with the files of images instead of their digests, as an agent sends them; images
    that `images` lacks keep their digests."""

    def with_file(part: Json) -> Json:
        image = images.get(digest_of(part))
        if image is None:
            return part
        image_fields = part[KIND] if isinstance(part[KIND], dict) else {}
        return {**part, KIND: {**image_fields, "url": data_url(image)}}

    return _changed(messages, lambda parts: [with_file(part) for part in parts])


def _changed(messages: Messages, change: Callable[[list[Json]], Json]) -> list[dict[str, Json]]:
    """Replace the content of messages that have a list of parts."""
    contents = ((message, message.get("content")) for message in messages)
    return [
        {**message, "content": change(content)} if isinstance(content, list) else message
        for message, content in contents
    ]


PNG, JPEG = b"\x89PNG\r\n\x1a\n", b"\xff\xd8\xff"
MAX_BYTES = 20_000_000  # bytes of a file; the gateway holds it in memory
MAX_PIXELS = 2**25  # of an image; they determine the cost of decoding, however small the file is
MAX_CHUNKS = 2**16  # of a file
ORIENTATION, UPRIGHT = 0x0112, (0, 1)  # EXIF tag and its values without a rotation
ANIMATED = "it is animated; send one frame as PNG"
CUT_OFF = "its file is cut off"
FRAMES = {*range(0xC0, 0xD0)} - {0xC4, 0xC8, 0xCC}  # markers of JPEG with a size
CMYK, RGB = 4, 2  # a JPEG's components, a PNG's type of colours
FILL = re.compile(b"\xff+")  # fill byte before the marker of a JPEG segment


class ImageRefusedError(Exception):
    """An image that a policy cannot see; its message is the rest of a sentence."""


class Header(NamedTuple):
    media_type: str
    width: int
    height: int


def read_header(body: bytes) -> Header:
    """Raises ImageRefusedError for a file that is not a complete, single image."""
    try:
        return _read(body)
    except (StructError, IndexError):
        raise ImageRefusedError(CUT_OFF) from None


def read_image(part: Mapping[str, Json]) -> Image:
    """The image of a part of a message, a file in a data URL. Raises ImageRefusedError."""
    if "uuid" in part:
        raise ImageRefusedError("it has a uuid, by which a server may show another one")
    body = _decoded(_url(part))
    media_type, width, height = read_header(body)
    if not (width and height):
        raise ImageRefusedError(f"its size is {width} x {height} pixels")
    if width * height > MAX_PIXELS:
        raise ImageRefusedError(
            f"it has {width} x {height} pixels, more than {MAX_PIXELS}; make it smaller"
        )
    return Image(sha256(body).hexdigest(), media_type, width, height, body)


def _url(part: Mapping[str, Json]) -> str:
    given = part.get(KIND)
    url = given.get("url") if isinstance(given, dict) else given
    return url if isinstance(url, str) else ""


def _decoded(url: str) -> bytes:
    """The content of a data URL of at most MAX_BYTES."""
    head, comma, data = url.partition(",")
    if not (comma and head[:5].lower() == "data:" and head[-7:].lower() == ";base64"):
        raise ImageRefusedError(
            f"its URL is {url[:40]!r}, which may show something else when the call is trained;"
            " send the file itself, as data:image/png;base64,..."
        )
    if (size := len(data) * 3 // 4 - data.count("=", -2)) > MAX_BYTES:
        raise ImageRefusedError(
            f"its file has {size} bytes, more than {MAX_BYTES}; make it smaller"
        )
    try:
        return msgspec.convert(data, bytes)  # seven times faster than `base64`
    except msgspec.ValidationError:
        raise ImageRefusedError("its data URL is not base64") from None


def _read(body: bytes) -> Header:
    if body.startswith(PNG):
        return Header("image/png", *_png(body))
    if body.startswith(JPEG):
        return Header("image/jpeg", *_jpeg(body))
    if body.startswith((b"GIF87a", b"GIF89a")):
        return Header("image/gif", *_gif(body))
    if body[:4] == b"RIFF" and body[8:12] == b"WEBP":
        return Header("image/webp", *_webp(body))
    start = body[:500].lstrip()
    if start.startswith((b"<svg", b"<?xml", b"<!DOCTYPE svg")):
        raise ImageRefusedError("it is SVG, a text; render it and send PNG")
    raise ImageRefusedError("it is not a PNG, JPEG, WebP or GIF file; send one of these")


def _png(body: bytes) -> tuple[int, int]:
    at, size, colour = len(PNG), (0, 0), 0
    for _ in range(MAX_CHUNKS):
        length, kind = unpack_from(">I4s", body, at)
        data, at = at + 8, at + 12 + length
        if at > len(body):
            break
        if kind == b"IHDR":
            width, height, depth, colour = unpack_from(">IIBB", body, data)
            size = width, height
            if (depth, colour) == (16, 0):
                raise ImageRefusedError("it is greyscale of 16 bits; send 8 bits")
        elif kind == b"tRNS" and colour == RGB:
            raise ImageRefusedError("one of its colours stands for transparency; send RGBA")
        elif kind == b"acTL" and unpack_from(">I", body, data)[0] > 1:
            raise ImageRefusedError(ANIMATED)
        elif kind == b"eXIf":
            _check_upright(body[data : data + length])
        elif kind == b"IEND":
            return size
    raise ImageRefusedError(CUT_OFF)


def _jpeg(body: bytes) -> tuple[int, int]:
    at, size = 2, (0, 0)
    for _ in range(MAX_CHUNKS):
        if fill := FILL.match(body, at):
            at = fill.end() - 1
        mark, kind, length = unpack_from(">BBH", body, at)
        if mark != 0xFF:
            break
        data = body[at + 4 : at + 2 + length]
        if kind in FRAMES:
            height, width, components = unpack_from(">HHB", data, 1)
            size = width, height
            if components == CMYK:
                raise ImageRefusedError("its colours are CMYK; send RGB")
        elif kind == 0xE1 and data.startswith(b"Exif\0\0"):
            _check_upright(data[6:])
        elif kind == 0xDA:  # what follows is compressed, up to the end
            if body.rfind(b"\xff\xd9", at) < 0:
                break
            return size
        at += 2 + length
    raise ImageRefusedError(CUT_OFF)


def _gif(body: bytes) -> tuple[int, int]:
    width, height, flags = unpack_from("<HHB", body, 6)
    at, frames = 13 + _colours(flags), 0
    for _ in range(MAX_CHUNKS):
        kind = body[at]
        if kind == 0x3B:  # the end
            if frames:
                return width, height
            break
        if kind == 0x2C:  # a frame
            frames += 1
            if frames > 1:
                raise ImageRefusedError(ANIMATED)
            at += 11 + _colours(body[at + 9])
        elif kind == 0x21:  # an extension
            at += 2
        else:
            break
        while body[at]:
            at += 1 + body[at]
        at += 1
    raise ImageRefusedError(CUT_OFF)


def _colours(flags: int) -> int:
    """Bytes of a GIF's table of colours."""
    return 3 << (flags & 7) + 1 if flags & 0x80 else 0


def _webp(body: bytes) -> tuple[int, int]:
    (length,) = unpack_from("<I", body, 4)
    if 8 + length > len(body):
        raise ImageRefusedError(CUT_OFF)
    sizes = []
    for kind, at, data in _chunks(body[: 8 + length]):
        if kind == b"VP8X":
            if body[at] & 0x02:
                raise ImageRefusedError(ANIMATED)
            wide, high = data[4:7], data[7:10]
            sizes.append(tuple(1 + int.from_bytes(side, "little") for side in (wide, high)))
        elif kind == b"VP8 ":
            width, height = unpack_from("<HH", data, 6)
            sizes.append((width & 0x3FFF, height & 0x3FFF))
        elif kind == b"VP8L":
            (bits,) = unpack_from("<I", data, 1)
            sizes.append((1 + (bits & 0x3FFF), 1 + (bits >> 14 & 0x3FFF)))
        elif kind == b"EXIF":
            _check_upright(data.removeprefix(b"Exif\0\0"))
    if not sizes:
        raise ImageRefusedError(CUT_OFF)
    width, height = sizes[0]
    return width, height


def _chunks(body: bytes) -> Iterator[tuple[bytes, int, bytes]]:
    """Yield kind, place and content of a WebP file's chunks."""
    at = 12
    for _ in range(MAX_CHUNKS):
        if at + 8 > len(body):
            return
        kind, length = unpack_from("<4sI", body, at)
        if at + 8 + length > len(body):
            raise ImageRefusedError(CUT_OFF)
        yield kind, at + 8, body[at + 8 : at + 8 + length]
        at += 8 + length + length % 2


def _check_upright(exif: bytes) -> None:
    """Raise ImageRefusedError if EXIF has a rotation."""
    order = {b"II*\0": "<", b"MM\0*": ">"}.get(exif[:4])
    if order is None:
        return
    try:
        (first,) = unpack_from(f"{order}I", exif, 4)
        (entries,) = unpack_from(f"{order}H", exif, first)
        for entry in range(entries):
            tag, _, _, value = unpack_from(f"{order}HHIH", exif, first + 2 + 12 * entry)
            if tag == ORIENTATION and value not in UPRIGHT:
                why = "only its EXIF data says that it is to be turned; send it upright"
                raise ImageRefusedError(why)
    except StructError:
        return  # decoders ignore broken EXIF
