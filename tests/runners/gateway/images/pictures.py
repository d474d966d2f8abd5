"""Image files, of every kind that an agent may send."""

from __future__ import annotations

import io
import struct
import zlib
from base64 import b64encode
from typing import Any

from PIL import Image


def picture(
    form: str = "PNG", size: tuple[int, int] = (8, 6), mode: str = "RGB", **more: Any
) -> bytes:
    """The file of an image whose pixels differ."""
    image = Image.new(mode, size)
    width, height = size
    bands = len(image.getbands())
    for x in range(min(width, 16)):
        for y in range(min(height, 16)):
            shade = (x * 40) % 256
            image.putpixel(
                (x, y), shade if bands == 1 else (shade, (y * 40) % 256, 90, 200)[:bands]
            )
    file = io.BytesIO()
    image.save(file, form, **more)
    return file.getvalue()


def exif(orientation: int) -> bytes:
    made = Image.Exif()
    made[0x0112] = orientation
    return made.tobytes()


def chunk(kind: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))


def claiming(width: int, height: int) -> bytes:
    """A small PNG that claims to be large."""
    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    rows = zlib.compress(bytes(1000))
    parts = [chunk(b"IHDR", header), chunk(b"IDAT", rows), chunk(b"IEND", b"")]
    return b"\x89PNG\r\n\x1a\n" + b"".join(parts)


def url(body: bytes, media_type: str = "image/png") -> str:
    return f"data:{media_type};base64,{b64encode(body).decode()}"
