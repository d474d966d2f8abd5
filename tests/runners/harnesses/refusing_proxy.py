"""An HTTP proxy that refuses every address but this machine's, and remembers what was asked for."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator

LOCAL = ("127.0.0.1", "localhost")


class RefusingProxy:
    def __init__(self) -> None:
        self.refused: list[str] = []

    @contextlib.asynccontextmanager
    async def serving(self) -> AsyncIterator[dict[str, str]]:
        """Listens inside the block, which is given the variables by which programs find it."""
        server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        named = dict.fromkeys(("HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY"), url)
        named["NO_PROXY"] = ",".join(LOCAL)
        try:
            yield named | {name.lower(): value for name, value in named.items()}
        finally:
            server.close()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError, ValueError, asyncio.IncompleteReadError):
            head = (await reader.readuntil(b"\r\n\r\n")).decode(errors="replace")
            method, address = head.split()[:2]
            host, _, port = address.rpartition(":")
            if method == "CONNECT" and host in LOCAL:  # some programs ignore NO_PROXY
                await self._tunnel(reader, writer, int(port))
            else:
                self.refused.append(address)
                writer.write(b"HTTP/1.1 502 refused\r\ncontent-length: 0\r\n\r\n")
        writer.close()

    async def _tunnel(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, port: int
    ) -> None:
        inner, outer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(b"HTTP/1.1 200 connected\r\n\r\n")

        async def copy(source: asyncio.StreamReader, target: asyncio.StreamWriter) -> None:
            with contextlib.suppress(OSError):
                while data := await source.read(65536):
                    target.write(data)
                    await target.drain()
            target.close()

        await asyncio.gather(copy(reader, outer), copy(inner, writer))
