"""Images as files: what is decoded, how, and what is refused with a sentence."""

from __future__ import annotations

import struct
import zlib
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from agentrl.algorithms.vision import images
from agentrl.algorithms.vision.images import (
    Catalogue,
    CatalogueImage,
    ImageError,
    Recent,
    decode,
    ids_of,
    positions,
)
from agentrl.tiny import vision
from tests.algorithms.vision.looks import WORDS, encoded, eyes_of, png


def colour(body: bytes, at: tuple[int, int] = (0, 0)) -> Any:
    return decode(body).getpixel(at)


def test_transparent_parts_are_white() -> None:
    clear = Image.new("RGBA", (4, 4), (255, 0, 0, 0))
    assert colour(encoded(clear, "PNG")) == (255, 255, 255)
    palette = Image.new("P", (4, 4), 1)
    palette.putpalette([0, 0, 0, 255, 0, 0])
    assert colour(encoded(palette, "PNG", transparency=1)) == (255, 255, 255)


def test_an_image_stands_as_its_exif_says() -> None:
    exif = Image.Exif()
    exif[0x0112] = 6  # turned by 90 degrees
    assert decode(encoded(Image.new("RGB", (8, 4)), "JPEG", exif=exif)).size == (4, 8)


@pytest.mark.parametrize("kind", ["PNG", "JPEG", "GIF", "WEBP", "TIFF"])
@pytest.mark.parametrize("mode", ["RGB", "L", "CMYK", "1", "P", "I;16"])
def test_every_mode_becomes_rgb(kind: str, mode: str) -> None:
    try:
        body = encoded(Image.new(mode, (1, 1)), kind)
    except (OSError, KeyError, ValueError):
        pytest.skip("no such file")
    assert decode(body).mode == "RGB"


def test_of_an_animation_the_first_picture_counts() -> None:
    pictures = [Image.new("RGB", (2, 2), name) for name in ("red", "blue")]
    body = encoded(pictures[0], "GIF", save_all=True, append_images=pictures[1:])
    red, _, blue = colour(body)
    assert red > blue


def bomb(width: int, height: int) -> bytes:
    """The beginning of a PNG of this size."""
    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    chunk = (
        struct.pack(">I", 13) + b"IHDR" + header + struct.pack(">I", zlib.crc32(b"IHDR" + header))
    )
    data = zlib.compress(bytes(100))
    body = (
        struct.pack(">I", len(data))
        + b"IDAT"
        + data
        + struct.pack(">I", zlib.crc32(b"IDAT" + data))
    )
    return b"\x89PNG\r\n\x1a\n" + chunk + body


@pytest.mark.parametrize(
    ("body", "words"),
    [
        (b"", "cannot be read"),
        (b"<svg xmlns='http://www.w3.org/2000/svg'/>", "cannot be read"),
        (png(1)[:200], "cannot be read"),
        (png(1)[:-20] + bytes(20), "cannot be read"),
        (bomb(9_000, 9_000), "more than"),
        (bomb(20_000, 20_000), "too large"),
    ],
)
def test_a_broken_file_is_an_image_error(body: bytes, words: str) -> None:
    with pytest.raises(ImageError, match=words):
        decode(body)


@pytest.mark.parametrize("size", [(1, 1), (1, 180), (500, 3)])
@pytest.mark.parametrize("kind", ["llava", "qwen2_5_vl", "qwen3_vl"])
def test_odd_shapes_have_as_many_ids_as_embeddings(kind: Any, size: tuple[int, int]) -> None:
    eyes = eyes_of(vision.make(kind, WORDS, most=28 * 56)[0])
    seen = eyes.catalogue.add(png(1, *size))
    with torch.no_grad():
        (found,) = eyes.encode([seen])
    assert len(found) == seen.size


def test_extreme_proportions_are_refused_by_qwen() -> None:
    eyes = eyes_of(vision.make("qwen3_vl", WORDS)[0])
    with pytest.raises(ImageError, match="image processor cannot read an image of 1 x 900 pixels"):
        eyes.catalogue.add(png(1, 1, 900))


def catalogue() -> Catalogue:
    def shape(pixels: Any) -> tuple[int, int, Any, int]:
        size = pixels["x"].shape[0]
        return size, size, np.arange(size)[None], size

    return Catalogue(lambda image: {"x": torch.zeros(image.width, 1000)}, shape)


def test_images_are_numbered_without_gaps_and_decoded_once() -> None:
    found = catalogue()
    a, b = found.add(png(1, 3, 3)), found.add(png(2, 5, 3))
    assert (a.first, b.first, len(found)) == (0, 3, 8)
    assert found.add(png(1, 3, 3)) is a
    assert found.decoded == 2
    assert ids_of(b).tolist() == [-4, -5, -6, -7, -8]
    assert found.of(np.array([6, 4, 0])) == [a, b]


def test_images_of_one_size_share_their_places(monkeypatch: pytest.MonkeyPatch) -> None:
    """A process sees millions, as long as their ids last."""
    catalogue = eyes_of(vision.make("qwen2_5_vl", WORDS, most=28 * 56)[0]).catalogue
    first, second, wide = (catalogue.add(png(70 + i, 28 + 28 * (i > 1), 28)) for i in range(3))
    assert first.places is second.places
    assert first.places is not wide.places
    monkeypatch.setattr(images, "MAX_EMBEDDINGS", len(catalogue))
    with pytest.raises(ImageError, match="start it again"):
        catalogue.add(png(73))
    assert catalogue.add(png(70, 28, 28)) is first


def test_pixels_and_files_are_dropped_beyond_their_limits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(images, "PIXEL_BYTES", 30_000)
    found = catalogue()
    bodies = [png(n, 3, 3) for n in range(4)]
    monkeypatch.setattr(images, "FILE_BYTES", 2 * len(bodies[0]))
    found.need({"needed": bodies[0]})
    seen = [found.add(body) for body in bodies]
    assert found.file("needed") == bodies[0]
    assert found.pixels(seen[3].digest)["x"].shape == (3, 1000)
    assert found.decoded == 4
    assert found.pixels(seen[2].digest)["x"].shape == (3, 1000)
    with pytest.raises(ImageError, match="no longer in memory"):
        found.pixels(seen[0].digest)


def test_a_value_is_measured_when_it_comes_and_when_it_goes() -> None:
    measured: list[int] = []
    kept = Recent[int](lambda value: measured.append(value) or 10)  # type: ignore[func-returns-value]
    for number in range(100):
        kept.put(str(number), number)
        kept.shrink(500, {"0"})
    kept.use("60")
    kept.shrink(400, {"0"})
    assert [n for n in range(100) if str(n) in kept] == [0, 60, *range(62, 100)]
    assert len(measured) <= 100 + 60


def test_positions_on_a_trie_are_those_of_its_rows() -> None:
    """Two rows that part within the text after an image of 2 x 3 embeddings."""
    places = np.indices((1, 2, 3)).reshape(3, -1)
    seen = CatalogueImage("a", 0, 6, 24, places, 3)
    first = [7, 8, *ids_of(seen).tolist(), 9, 10]
    second = [7, 8, *ids_of(seen).tolist(), 11, 12, 13]
    rows = [positions(np.array(row), [seen]) for row in (first, second)]
    assert rows[0][:, :3].tolist() == [[0, 1, 2], [0, 1, 2], [0, 1, 2]]
    assert rows[0][:, 7].tolist() == [2, 3, 4]
    assert rows[0][:, 8].tolist() == [5, 5, 5]
    nodes = np.array([*first, *second[8:]])
    end = np.array([13] * 8 + [10, 10] + [13] * 3)
    found = positions(nodes, [seen], end)
    assert (found[:, :10] == rows[0]).all()
    assert (found[:, 10:] == rows[1][:, 8:]).all()
