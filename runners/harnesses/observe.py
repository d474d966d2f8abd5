"""What a program sends: a proxy in front of the gateway that keeps every request, and one in front
of the internet that refuses all of them."""

from __future__ import annotations

import asyncio
import contextlib
import time
from dataclasses import dataclass, field

import aiohttp
import msgspec
from aiohttp import web

from agentrl.http_server import listen
from agentrl.types import Json

HOP = {"host", "content-length", "transfer-encoding", "connection", "accept-encoding"}


@dataclass(slots=True)
class SeenRequest:
    """A request and how it was answered."""

    at: float  # unix seconds
    method: str
    path: str  # with the query
    headers: dict[str, str]  # names in lower case
    raw: bytes
    status: int = 0
    error: str = ""  # the body of a refusal

    @property
    def body(self) -> dict[str, Json]:
        """Empty where the request has no JSON object."""
        with contextlib.suppress(msgspec.DecodeError, UnicodeDecodeError):
            return msgspec.json.decode(self.raw, type=dict)
        return {}


@dataclass
class RequestLog:
    """Passes every request on to `target`, an URL without a path, and streams the answer back."""

    target: str
    seen: list[SeenRequest] = field(default_factory=list)
    url: str = ""
    _runner: web.AppRunner | None = None
    _session: aiohttp.ClientSession | None = None

    async def start(self) -> None:
        app = web.Application(client_max_size=2**28)
        app.router.add_route("*", "/{path:.*}", self._pass_on)
        self._session = aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=None))
        self._runner, self.url = await listen(app, "127.0.0.1", 0)

    async def close(self) -> None:
        if self._runner is not None:
            await self._runner.cleanup()
        if self._session is not None:
            await self._session.close()

    async def _pass_on(self, request: web.Request) -> web.StreamResponse:
        assert self._session is not None
        raw, headers = await request.read(), {k.lower(): v for k, v in request.headers.items()}
        one = SeenRequest(time.time(), request.method, request.path_qs, headers, raw)
        self.seen.append(one)
        url, passed = (
            self.target + request.path_qs,
            {k: v for k, v in headers.items() if k not in HOP},
        )
        async with self._session.request(request.method, url, data=raw, headers=passed) as reply:
            one.status = reply.status
            kept = {k: v for k, v in reply.headers.items() if k.lower() not in HOP}
            answer = web.StreamResponse(status=reply.status, headers=kept)
            await answer.prepare(request)
            async for part in reply.content.iter_any():
                one.error += part.decode(errors="replace") if reply.status >= 400 else ""
                await answer.write(part)
        return answer


@dataclass
class RefusingProxy:
    """An HTTP proxy that refuses every address but this machine's, and remembers it."""

    refused: list[str] = field(default_factory=list)
    url: str = ""
    _server: asyncio.Server | None = None

    async def start(self) -> None:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        self.url = f"http://127.0.0.1:{self._server.sockets[0].getsockname()[1]}"

    async def close(self) -> None:
        if self._server is not None:
            self._server.close()

    @property
    def environment(self) -> dict[str, str]:
        """Variables by which programs find it."""
        named = dict.fromkeys(("HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY"), self.url)
        named |= {"NO_PROXY": "127.0.0.1,localhost"}
        return named | {name.lower(): value for name, value in named.items()}

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError, ValueError, asyncio.IncompleteReadError):
            head = (await reader.readuntil(b"\r\n\r\n")).decode(errors="replace")
            method, address = head.split()[:2]
            host, _, port = address.rpartition(":")
            if method == "CONNECT" and host in ("127.0.0.1", "localhost"):
                await self._tunnel(reader, writer, int(port))
            else:  # some programs ask the proxy for this machine too
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
