"""What runs inside vLLM's HTTP server: middleware that holds requests and names versions.

`python -m agentrl.algorithms.engines.vllm.child ARGUMENTS` is `vllm serve` that ends with its
parent process. vLLM has no policy versions and cannot keep requests waiting while weights change;
the middleware adds both. Always true: a response names the version that was current when its
request was admitted, the oldest of its tokens; while requests are held, and new ones are not only
kept waiting, none is in flight.
"""

from __future__ import annotations

import os
import runpy
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

import msgspec

from agentrl.algorithms.engines.base import VERSION_HEADER, RequestHold, parse_versions
from agentrl.algorithms.engines.vllm.serving import CLOSE, HOLD, OPEN
from agentrl.processes import die_with_parent

KEY_VARIABLE = "AGENTRL_VLLM_KEY"  # environment variable with the secret of control requests
KEY_HEADER = "x-agentrl-key"  # of a control request: that secret
ADAPTERS = "/v1/load_lora_adapter", "/v1/unload_lora_adapter"  # control requests

AsgiMessage = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[AsgiMessage]]
Send = Callable[[AsgiMessage], Awaitable[None]]
AsgiApp = Callable[[MutableMapping[str, Any], Receive, Send], Awaitable[None]]


class _Request(msgspec.Struct):
    model: str = ""


class HoldMiddleware:
    """ASGI middleware around vLLM's server. Requests with the key are control requests: `POST
    /agentrl/hold` is answered once no call is in flight, `/agentrl/close` only keeps new calls
    waiting, `/agentrl/open?VERSIONS` admits calls, for the first time or again, and every other
    path is vLLM's own. Requests without it reach only /health and the paths that ask a model."""

    def __init__(self, app: AsgiApp) -> None:
        self._app = app
        self._key = os.environ[KEY_VARIABLE].encode()
        self._requests = RequestHold()

    async def __call__(self, scope: MutableMapping[str, Any], receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self._app(scope, receive, send)
        elif scope["type"] != "http":  # a websocket would not be held
            await send({"type": "websocket.close", "code": 1008})
        elif dict(scope["headers"]).get(KEY_HEADER.encode()) == self._key:
            await self._handle_control(scope, receive, send)
        elif is_public_path(scope["path"]):
            await self._serve(scope, receive, send)
        else:
            await _answer(send, 404)

    async def _handle_control(
        self, scope: MutableMapping[str, Any], receive: Receive, send: Send
    ) -> None:
        if scope["path"] == HOLD:
            await self._requests.hold()
            await _answer(send, 200)
        elif scope["path"] == CLOSE:
            self._requests.close()
            await _answer(send, 200)
        elif scope["path"] == OPEN:
            if query := scope["query_string"].decode():
                self._requests.versions = parse_versions(query)
            self._requests.release()
            await _answer(send, 200)
        else:
            await self._app(scope, receive, send)

    async def _serve(self, scope: MutableMapping[str, Any], receive: Receive, send: Send) -> None:
        # Read first: a request that is never sent to its end must not hold up an update.
        receive, body = await _read(receive)
        await self._requests.wait_released()
        with self._requests.call():
            version = self._requests.version_of(requested_model(body))

            async def stamped(message: AsgiMessage) -> None:
                if message["type"] == "http.response.start" and version is not None:
                    added = VERSION_HEADER.encode(), str(version).encode()
                    message["headers"] = [*message.get("headers", ()), added]
                await send(message)

            await self._app(scope, receive, stamped)


def is_public_path(path: str) -> bool:
    """Whether requests without the key may use this path."""
    open = path in ("/health", "/tokenize")
    return open or (path.startswith("/v1/") and path not in ADAPTERS)


def requested_model(body: bytes) -> str:
    """The model that a request names; empty if it names none or is not JSON."""
    try:
        return msgspec.json.decode(body, type=_Request).model
    except msgspec.DecodeError:
        return ""


async def _read(receive: Receive) -> tuple[Receive, bytes]:
    """A request's body, and a `receive` that delivers it again."""
    messages: list[AsgiMessage] = []
    while not messages or messages[-1].get("more_body"):
        messages.append(await receive())
    body = b"".join(message.get("body", b"") for message in messages)

    async def again() -> AsgiMessage:
        return messages.pop(0) if messages else await receive()

    return again, body


async def _answer(send: Send, status: int) -> None:
    await send({"type": "http.response.start", "status": status, "headers": []})
    await send({"type": "http.response.body", "body": b""})


if __name__ == "__main__":
    die_with_parent()
    runpy.run_module("vllm.entrypoints.openai.api_server", run_name="__main__", alter_sys=True)
