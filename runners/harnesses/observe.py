"""A proxy in front of the gateway that keeps every request of a program, refused ones too."""

from __future__ import annotations

import contextlib
import time
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass

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
    path: str  # method and path, with the query
    size: int  # bytes
    body: dict[str, Json]  # empty where it is no JSON object
    status: int = 0
    error: str = ""  # the body of a refusal
    role: str = ""  # of the call, where it was recorded

    @property
    def asks(self) -> bool:
        """Whether it is a model call that was answered."""
        prompt = {"messages", "input", "contents"} & self.body.keys()
        return bool(prompt) and self.status == 200 and "count" not in self.path

    @property
    def tools(self) -> int:
        offered = self.body.get("tools") or ()
        return sum(len(tool.get("functionDeclarations") or (tool,)) for tool in offered)


class RequestLog:
    """Passes every request on to `target`, an URL without a path, and streams the answer back."""

    def __init__(self, target: str) -> None:
        self.target = target
        self.seen: list[SeenRequest] = []

    @contextlib.asynccontextmanager
    async def serving(self) -> AsyncIterator[str]:
        """Listens inside the block, which is given the URL."""
        app = web.Application(client_max_size=2**28)
        app.router.add_route("*", "/{path:.*}", self._pass_on)
        async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=None)) as session:
            self._session = session
            runner, url = await listen(app, "127.0.0.1", 0)
            try:
                yield url
            finally:
                await runner.cleanup()

    async def _pass_on(self, request: web.Request) -> web.StreamResponse:
        raw, body, method = await request.read(), {}, request.method
        with contextlib.suppress(msgspec.DecodeError, UnicodeDecodeError):
            body = msgspec.json.decode(raw, type=dict)
        one = SeenRequest(time.time(), f"{method} {request.path_qs}", len(raw), body)
        self.seen.append(one)
        url, headers = self.target + request.path_qs, _passed(request.headers)
        async with self._session.request(method, url, data=raw, headers=headers) as reply:
            one.status = reply.status
            answer = web.StreamResponse(status=reply.status, headers=_passed(reply.headers))
            await answer.prepare(request)
            async for part in reply.content.iter_any():
                one.error += part.decode(errors="replace") if reply.status >= 400 else ""
                await answer.write(part)
        return answer


def _passed(headers: Mapping[str, str]) -> dict[str, str]:
    return {name: value for name, value in headers.items() if name.lower() not in HOP}
