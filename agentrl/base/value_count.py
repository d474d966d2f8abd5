"""How many values a body has, told from its bytes before it is decoded.

A decoder holds Python's lock until it is done, so while it makes millions of small objects a server
answers nobody, in whichever thread it decodes. These counts end early, and let other threads in
between. Decoders make numbers much faster than texts, lists and objects: `NUMBERS` of them count as
one value.
"""

from __future__ import annotations

SMALL_BODY = 2**20  # bytes, of which a decoder makes all in a moment
NUMBERS = 8
SLICE = 2**18  # bytes of JSON that are looked at in one go
_OTHER = bytes(set(range(256)) - set(b'",[{'))  # what neither separates nor encloses values
# MessagePack, by first byte. Bytes of a number; bytes of the length of a text or the like, and
# bytes of a type after it; bytes of the number of items of a list or map.
_NUMBERS = {0xCA: 4, 0xCB: 8, 0xCC: 1, 0xCD: 2, 0xCE: 4, 0xCF: 8, 0xD0: 1, 0xD1: 2, 0xD2: 4}
_NUMBERS |= {0xD3: 8, 0xD4: 2, 0xD5: 3, 0xD6: 5, 0xD7: 9, 0xD8: 17}
_LENGTHS = {0xC4: (1, 0), 0xC5: (2, 0), 0xC6: (4, 0), 0xD9: (1, 0), 0xDA: (2, 0), 0xDB: (4, 0)}
_LENGTHS |= {0xC7: (1, 1), 0xC8: (2, 1), 0xC9: (4, 1)}
_ITEMS = {0xDC: 2, 0xDD: 4, 0xDE: 2, 0xDF: 4}


def json_values(body: bytes, most: int) -> int:
    """The number of values of a JSON text, or a number above `most`."""
    quotes = commas = openings = at = values = 0
    while at < len(body) and values <= most:
        end = at + SLICE
        while body[end - 1 : end] == b"\\":  # it belongs to what follows
            end += 1
        part = body[at:end].replace(b"\\\\", b"").replace(b'\\"', b"")
        pieces = part.translate(None, _OTHER).split(b'"')
        outside = b"".join(pieces[quotes % 2 :: 2])
        commas += outside.count(b",")
        openings += len(outside) - outside.count(b",")
        quotes, at = quotes + len(pieces) - 1, end
        values = quotes // 2 + openings + commas // NUMBERS
    return values


def msgpack_values(body: bytes, most: int) -> int:
    """The number of values of a MessagePack body, or a number above `most`."""
    at = numbers = values = 0
    while at < len(body) and values + numbers // NUMBERS <= most:
        first = body[at]
        at += 1
        if first <= 0x7F or first >= 0xE0 or first in (0xC0, 0xC2, 0xC3):
            numbers += 1
        elif first in _NUMBERS:
            numbers += 1
            at += _NUMBERS[first]
        else:
            values += 1
            if 0xA0 <= first <= 0xBF:  # a short text
                at += first & 0x1F
            elif first in _LENGTHS:
                size, kind = _LENGTHS[first]
                at += size + kind + int.from_bytes(body[at : at + size])
            else:
                at += _ITEMS.get(first, 0)
    return values + numbers // NUMBERS
