"""Keeps every request of a program, refused ones too."""

from __future__ import annotations

import contextlib
import time
from dataclasses import dataclass

import msgspec
from aiohttp import web
from aiohttp.typedefs import Handler

from agentrl.types import Json


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
    """Of a gateway, as its `watch`."""

    def __init__(self) -> None:
        self.seen: list[SeenRequest] = []

    @web.middleware
    async def watch(self, request: web.Request, handler: Handler) -> web.StreamResponse:
        raw, body = await request.read(), {}
        with contextlib.suppress(msgspec.DecodeError, UnicodeDecodeError):
            body = msgspec.json.decode(raw, type=dict)
        path = f"{request.method} {request.path_qs}"
        one = SeenRequest(time.time(), path, len(raw), body)
        self.seen.append(one)
        answer = await handler(request)
        one.status = answer.status
        if answer.status >= 400 and isinstance(answer, web.Response):
            one.error = answer.text or ""
        return answer
