"""Reads the bodies of requests, with limits on their size, their time and their memory."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping

from starlette.exceptions import HTTPException
from starlette.types import Receive

from agentrl.errors import Unavailable

LONGEST_SILENCE = 30.0  # seconds without a byte after which a body is abandoned
LONGEST_UPLOAD = 120.0  # seconds for a complete body
# Texts, lists and objects of a body, which are decoded in about a second. Rows have fewer in the
# largest body; a body of fewer bytes cannot have more, so it is not counted.
MAX_VALUES = 10_000_000
MOST_BYTES_HELD = 128 * 2**20  # total bytes of all incomplete bodies


class BodyReader:
    """Reads the request bodies of one server."""

    def __init__(self, largest: int) -> None:
        self._largest, self._free = largest, max(MOST_BYTES_HELD, largest)

    async def read(self, headers: Mapping[bytes, bytes], receive: Receive) -> bytes:
        """Read a complete body. Raises HTTPException as soon as it is known to be too large,
        Unavailable if the rest does not arrive or memory is short, ConnectionAbortedError if the
        client has closed the connection."""
        length = headers.get(b"content-length", b"0")
        self._check(int(length) if length.isdigit() else 0)
        body, more = await _part(receive)
        self._check(len(body))
        return await self._rest(bytearray(body), receive) if more else body

    async def _rest(self, body: bytearray, receive: Receive) -> bytes:
        held, more = self._hold(len(body)), True
        try:
            async with asyncio.timeout(LONGEST_UPLOAD):
                while more:
                    part, more = await _part(receive)
                    held += self._hold(len(part))
                    body += part
                    self._check(len(body))
        except TimeoutError:
            why = f"The body took over {LONGEST_UPLOAD:.0f} s: send less at a time."
            raise Unavailable(why) from None
        finally:
            self._free += held
        return bytes(body)

    def _hold(self, size: int) -> int:
        if size > self._free:
            raise Unavailable("Too many large bodies are being sent: repeat the call.")
        self._free -= size
        return size

    def _check(self, size: int) -> None:
        if size > self._largest:
            raise HTTPException(
                413, f"The body is larger than {self._largest} bytes: send less at a time."
            )


async def check_values(body: bytes, count: Callable[[bytes, int], int]) -> None:
    """Raise HTTPException for a body of more values than can be decoded while others wait."""
    if len(body) > MAX_VALUES and await asyncio.to_thread(count, body, MAX_VALUES) > MAX_VALUES:
        said = f"The body has more than {MAX_VALUES:,} texts, lists and objects"
        raise HTTPException(413, f"{said}: send fewer at a time.")


async def _part(receive: Receive) -> tuple[bytes, bool]:
    """Receive the next bytes; return them and whether there are more."""
    try:
        async with asyncio.timeout(LONGEST_SILENCE):
            message = await receive()
    except TimeoutError:
        raise Unavailable("The rest of the body did not come: repeat the call.") from None
    if message["type"] == "http.disconnect":
        raise ConnectionAbortedError
    return message.get("body", b""), message.get("more_body", False)
