"""What a file is, is known from its header; what decoders show differently is refused."""

from __future__ import annotations

import contextlib
import random

import pytest

from agentrl.core.images import Header, ImageRefusedError, read_header
from tests.runners.gateway.images.pictures import chunk, claiming, exif, picture

SIZES = [(1, 1), (8, 6), (300, 2), (1, 400), (1280, 800)]
WHOLE = {
    "png": picture(),
    "png-alpha": picture(mode="RGBA"),
    "png-palette": picture(mode="P"),
    "png-grey": picture(mode="L"),
    "jpeg": picture("JPEG"),
    "jpeg-progressive": picture("JPEG", progressive=True),
    "jpeg-grey": picture("JPEG", mode="L"),
    "jpeg-upright": picture("JPEG", exif=exif(1)),
    "gif": picture("GIF", mode="P"),
    "webp": picture("WEBP"),
    "webp-lossless": picture("WEBP", lossless=True),
    "webp-alpha": picture("WEBP", mode="RGBA"),
    "webp-upright": picture("WEBP", exif=exif(1)),
}


@pytest.mark.parametrize("name", WHOLE)
def test_type_and_size(name: str) -> None:
    kind = name.partition("-")[0]
    assert read_header(WHOLE[name]) == Header(f"image/{kind}", 8, 6)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("form", ["PNG", "JPEG", "GIF", "WEBP"])
def test_sizes(form: str, size: tuple[int, int]) -> None:
    assert read_header(picture(form, size))[1:] == size
    if form == "WEBP":
        assert read_header(picture(form, size, lossless=True))[1:] == size
        assert read_header(picture(form, size, mode="RGBA"))[1:] == size


def test_fill_before_the_segments_of_a_jpeg() -> None:
    body = WHOLE["jpeg"]
    assert read_header(body[:2] + b"\xff" * 9 + body[2:]) == Header("image/jpeg", 8, 6)
    with pytest.raises(ImageRefusedError, match="cut off"):
        read_header(body[:2] + b"\xff" * 20_000_000)  # at once


def test_what_a_header_claims_costs_nothing() -> None:
    assert read_header(claiming(2**31 - 1, 2**31 - 1))[1:] == (2**31 - 1, 2**31 - 1)
    assert read_header(claiming(0, 5))[1:] == (0, 5)
    assert read_header(b"\x89PNG\r\n\x1a\n" + chunk(b"IEND", b""))[1:] == (0, 0)


def frames(form: str) -> bytes:
    from PIL import Image

    more = [Image.new("RGB", (8, 6), colour) for colour in ("red", "blue")]
    return picture(form, save_all=True, append_images=more, duration=50)


@pytest.mark.parametrize("form", ["PNG", "GIF", "WEBP"])
def test_animations_are_refused(form: str) -> None:
    with pytest.raises(ImageRefusedError, match="animated"):
        read_header(frames(form))


@pytest.mark.parametrize("orientation", [2, 3, 6, 8])
@pytest.mark.parametrize("form", ["PNG", "JPEG", "WEBP"])
def test_a_rotation_that_only_exif_tells_is_refused(form: str, orientation: int) -> None:
    with pytest.raises(ImageRefusedError, match="upright"):
        read_header(picture(form, exif=exif(orientation)))


@pytest.mark.parametrize(
    ("body", "why"),
    [
        (picture("JPEG", mode="CMYK"), "CMYK"),
        (picture(mode="I;16"), "16 bits"),
        (picture(transparency=(0, 0, 90)), "transparency; send RGBA"),
        (b'<svg xmlns="http://www.w3.org/2000/svg"/>', "SVG"),
        (b'\n<?xml version="1.0"?><svg/>', "SVG"),
        (picture("BMP"), "not a PNG"),
        (picture("TIFF"), "not a PNG"),
        (b"%PDF-1.7", "not a PNG"),
        (b"\0\0\0\x20ftypavif", "not a PNG"),
        (b"", "not a PNG"),
    ],
)
def test_others_are_refused(body: bytes, why: str) -> None:
    with pytest.raises(ImageRefusedError, match=why):
        read_header(body)


@pytest.mark.parametrize("name", WHOLE)
def test_every_file_that_is_cut_off_is_refused(name: str) -> None:
    body = WHOLE[name]
    for size in {*range(len(body)), len(body) - 1}:
        if (name, len(body) - size) == ("webp", 1) and len(body) % 2:
            continue  # a fill byte
        with pytest.raises(ImageRefusedError):
            read_header(body[:size])


@pytest.mark.parametrize("name", WHOLE)
def test_a_damaged_file_is_read_or_refused(name: str) -> None:
    chance = random.Random(name)
    for _ in range(300):
        body = bytearray(WHOLE[name])
        for _ in range(chance.randint(1, 4)):
            body[chance.randrange(len(body))] = chance.randrange(256)
        with contextlib.suppress(ImageRefusedError):
            read_header(bytes(body))
