"""What a column holds that no database has a type for: JSON, text from outside, arrays."""

from __future__ import annotations

import sys
from array import array
from typing import Any

import msgspec

from agentrl.errors import Invalid
from agentrl.types import Json


def to_json(value: Json, what: str) -> str:
    """JSON text of a user's payload. Raises Invalid, naming `what`, if it is none or has an integer
    of more than 64 bits, which msgpack, and so whoever reads it over HTTP, does not have."""
    try:
        msgspec.msgpack.encode(value)
        return msgspec.json.encode(value).decode()
    except OverflowError as error:
        raise Invalid(
            f"{what} has an integer of more than 64 bits: send it as text or as a float."
        ) from error
    except (TypeError, ValueError, RecursionError, msgspec.MsgspecError) as error:
        raise Invalid(f"{what} cannot be written as JSON: {error}.") from error


def from_json(text: str | None) -> Json:
    return None if text is None else msgspec.json.decode(text)


def storable_text(text: str) -> str:
    """Text from the outside world: lone surrogates and zeros, which not every database stores,
    become `?`."""
    return text.encode("utf-8", "replace").decode().replace("\0", "?")


def to_blob(values: array[Any]) -> bytes:
    """Little-endian, as it is stored."""
    if sys.byteorder == "big":
        values = values[:]
        values.byteswap()
    return values.tobytes()


def from_blob(typecode: str, data: bytes) -> array[Any]:
    values: array[Any] = array(typecode)
    values.frombytes(data)
    if sys.byteorder == "big":
        values.byteswap()
    return values
