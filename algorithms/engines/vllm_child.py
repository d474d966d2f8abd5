"""What runs inside vLLM's HTTP server: the door that its calls go through.

`python -m agentrl.algorithms.engines.vllm_child ARGUMENTS` is `vllm serve` that ends with its
parent. vLLM knows neither versions nor how to keep calls waiting while weights change, and its
answers do not say which weights they came from; the door adds that. Always true: behind a held door
no call is in flight, and an answer names the version that was current when its call was let in.
"""

from __future__ import annotations

import asyncio
import os
import runpy
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

from agentrl.processes import die_with_parent

KEY = "AGENTRL_VLLM_KEY"  # environment variable with what the parent proves itself with
VERSION = "AGENTRL_VLLM_VERSION"  # and with the version that is served at first
CONTROL = b"x-agentrl-key"
HOLD, OPEN = "/agentrl/hold", "/agentrl/open"
POLICY_VERSION = b"x-policy-version"

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[MutableMapping[str, Any], Receive, Send], Awaitable[None]]


class Door:
    """ASGI middleware around vLLM's server. With the key: `POST /agentrl/hold` answers once no call
    is in flight, `/agentrl/open?VERSION` lets calls in again, and every other path is vLLM's.
    Without it there are /v1 and /health."""

    def __init__(self, app: App) -> None:
        self._app = app
        self._key = os.environ[KEY].encode()
        self._version = os.environ[VERSION].encode()
        self._inside = 0
        self._open, self._empty = asyncio.Event(), asyncio.Event()
        self._open.set()
        self._empty.set()

    async def __call__(self, scope: MutableMapping[str, Any], receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
        elif dict(scope["headers"]).get(CONTROL) == self._key:
            await self._obey(scope, receive, send)
        elif scope["path"] == "/health" or scope["path"].startswith("/v1/"):
            await self._serve(scope, receive, send)
        else:
            await _answer(send, 404)

    async def _obey(self, scope: MutableMapping[str, Any], receive: Receive, send: Send) -> None:
        if scope["path"] == HOLD:
            self._open.clear()
            await self._empty.wait()
            await _answer(send, 200)
        elif scope["path"] == OPEN:
            self._version = scope["query_string"] or self._version
            self._open.set()
            await _answer(send, 200)
        else:
            await self._app(scope, receive, send)

    async def _serve(self, scope: MutableMapping[str, Any], receive: Receive, send: Send) -> None:
        while not self._open.is_set():
            await self._open.wait()
        version = self._version

        async def stamped(message: Message) -> None:
            if message["type"] == "http.response.start":
                message["headers"] = [*message.get("headers", ()), (POLICY_VERSION, version)]
            await send(message)

        self._inside += 1
        self._empty.clear()
        try:
            await self._app(scope, receive, stamped)
        finally:
            self._inside -= 1
            if not self._inside:
                self._empty.set()


async def _answer(send: Send, status: int) -> None:
    await send({"type": "http.response.start", "status": status, "headers": []})
    await send({"type": "http.response.body", "body": b""})


if __name__ == "__main__":
    die_with_parent()
    runpy.run_module("vllm.entrypoints.openai.api_server", run_name="__main__", alter_sys=True)
