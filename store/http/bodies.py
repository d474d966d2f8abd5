"""Bodies of requests: how large, for how long, and how much of them all is held at a time.

Owns: the count of bytes of bodies that are still coming. Always true: it is at most `held`; a body
that came in one piece is never refused for others that are slow.
"""

from __future__ import annotations

import asyncio

from starlette.exceptions import HTTPException
from starlette.types import Receive

from agentrl.errors import Unavailable

SILENCE = 30.0  # seconds without a byte after which the rest of a body is not waited for
WHOLE = 120.0  # seconds for a whole body
HELD = 128 * 2**20  # bytes of bodies that are still coming, all together


class BodyReader:
    """Reads the bodies of one server."""

    def __init__(self, largest: int, held: int = HELD) -> None:
        self._largest, self._free = largest, max(held, largest)

    async def read(self, headers: dict[bytes, bytes], receive: Receive) -> bytes:
        """The whole body. Raises HTTPException as soon as it is known to be too large, Unavailable
        when the rest does not come or there is no room for it, ConnectionAbortedError when the
        client has gone."""
        length = headers.get(b"content-length", b"0")
        self._check(int(length) if length.isdigit() else 0)
        body, more = await _part(receive)
        self._check(len(body))
        return await self._rest(bytearray(body), receive) if more else body

    async def _rest(self, body: bytearray, receive: Receive) -> bytes:
        held, more = self._hold(len(body)), True
        try:
            async with asyncio.timeout(WHOLE):
                while more:
                    part, more = await _part(receive)
                    held += self._hold(len(part))
                    body += part
                    self._check(len(body))
        except TimeoutError:
            raise Unavailable(f"The body took over {WHOLE:.0f} s: send less at a time.") from None
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


async def _part(receive: Receive) -> tuple[bytes, bool]:
    """The next bytes, and whether there are more."""
    try:
        async with asyncio.timeout(SILENCE):
            message = await receive()
    except TimeoutError:
        raise Unavailable("The rest of the body did not come: repeat the call.") from None
    if message["type"] == "http.disconnect":
        raise ConnectionAbortedError
    return message.get("body", b""), message.get("more_body", False)
