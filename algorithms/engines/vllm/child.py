"""The process of a vLLM server, and the middleware that holds requests while weights change."""

from __future__ import annotations

import os
import runpy
from collections.abc import Mapping, MutableMapping
from typing import Any

import msgspec

from agentrl.algorithms.engines.base import VERSION_HEADER, RequestHold
from agentrl.algorithms.engines.vllm.protocol import (
    CLOSE,
    HOLD,
    LOAD,
    OPEN,
    REPLACED,
    RUNNING,
    UNLOAD,
    AsgiApp,
    AsgiMessage,
    Receive,
    Send,
    SpanMiddleware,
    answer,
    parse_versions,
    versioned,
)
from agentrl.core.access import Access
from agentrl.core.http import NO_KEY, request_key
from agentrl.core.processes import die_with_parent, seal

KEY_VARIABLE = "AGENTRL_VLLM_KEY"  # environment variable with the secret of control requests
CALLERS_VARIABLE = "AGENTRL_VLLM_CALLERS"  # environment variable with the keys of callers, if any
KEY_HEADER = "x-agentrl-key"  # header of control requests with the secret
NO_PLACEHOLDER = b"Failed to apply prompt replacement"  # part of vLLM's error message
DROPPED = (
    "the model's chat template drops an image of the request, so the model would not see it; send "
    "images in the messages of users, or replace its chat_template.jinja"
)
KEYS: dict[str, str] = {}  # both variables' values, hidden from the processes that vLLM starts


class HoldMiddleware:
    """ASGI middleware around vLLM's server. Requests with the secret are control requests: `POST
    /agentrl/hold` keeps new calls waiting and returns once no call is in flight, `/agentrl/close`
    returns at once, `/agentrl/open?VERSIONS` admits calls, `/agentrl/running` lists the adapters of
    calls in flight, and every other path is vLLM's own. Requests without the secret reach only
    /health and, with a caller's key, the paths of model calls."""

    def __init__(self, app: AsgiApp) -> None:
        self._app = SpanMiddleware(app)
        self._key = KEYS[KEY_VARIABLE].encode()
        self._callers = Access(tuple(KEYS.get(CALLERS_VARIABLE, "").split()))
        self._requests = RequestHold()

    async def __call__(self, scope: MutableMapping[str, Any], receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self._app(scope, receive, send)
        elif scope["type"] != "http":  # a websocket would not be held
            await send({"type": "websocket.close", "code": 1008})
        elif (headers := dict(scope["headers"])).get(KEY_HEADER.encode()) == self._key:
            await self._handle_control(scope, receive, send)
        elif scope["path"] != "/health" and not self._allows(headers):
            await answer(send, 401, msgspec.json.encode({"error": {"message": NO_KEY}}))
        elif is_public_path(scope["path"]):
            await self._serve(scope, receive, send)
        else:
            await answer(send, 404)

    def _allows(self, headers: Mapping[bytes, bytes]) -> bool:
        decoded = {
            name.decode("latin-1"): value.decode("latin-1") for name, value in headers.items()
        }
        return self._callers.allows(request_key(decoded))

    async def _handle_control(
        self, scope: MutableMapping[str, Any], receive: Receive, send: Send
    ) -> None:
        if scope["path"] == HOLD:
            await self._requests.hold()
            await answer(send, 200)
        elif scope["path"] == CLOSE:
            self._requests.close()
            await answer(send, 200)
        elif scope["path"] == OPEN:
            if query := scope["query_string"].decode():
                self._requests.versions = parse_versions(query)
            self._requests.release()
            await answer(send, 200)
        elif scope["path"] == RUNNING:
            await answer(send, 200, msgspec.json.encode(list(self._requests.running)))
        else:
            await self._app(scope, receive, send)

    async def _serve(self, scope: MutableMapping[str, Any], receive: Receive, send: Send) -> None:
        # Read first: a request whose body never ends must not delay an update.
        body = await _read(receive)
        await self._requests.wait_released()
        body, name, version = to_version(body, self._requests.versions)
        with self._requests.call(name):
            stamp = [] if version is None else [(VERSION_HEADER.encode(), b"%d" % version)]
            headers = [header for header in scope["headers"] if header[0] not in REPLACED]
            headers = [*headers, *stamp, (b"content-length", b"%d" % len(body))]
            sent: list[AsgiMessage] = [{"type": "http.request", "body": body}]

            async def again() -> AsgiMessage:
                return sent.pop() if sent else await receive()

            failed: AsgiMessage = {}  # start of an error response that may be caused by the request

            async def stamped(message: AsgiMessage) -> None:
                if message["type"] == "http.response.start":
                    message["headers"] = [*message.get("headers", ()), *stamp]
                    if message["status"] == 500:
                        failed.update(message)
                        return
                elif failed:
                    failed["status"], message["body"] = error_of(message.get("body", b""))
                    if failed["status"] != 500:
                        failed["headers"] = stamp
                    await send(dict(failed))
                    failed.clear()
                await send(message)

            await self._app({**scope, "headers": headers}, again, stamped)


def is_public_path(path: str) -> bool:
    """Whether requests without the secret may use this path."""
    open = path in ("/health", "/tokenize")
    return open or (path.startswith("/v1/") and path not in (LOAD, UNLOAD))


def error_of(body: bytes) -> tuple[int, bytes]:
    """Status and body in place of vLLM's response with status 500. vLLM reports an image for which
    the chat template wrote no placeholder as an internal error, which would be retried; here it
    becomes a client error, 400."""
    if NO_PLACEHOLDER not in body:
        return 500, body
    error = {"message": DROPPED, "type": "BadRequestError", "param": "messages", "code": 400}
    return 400, msgspec.json.encode({"error": error})


def to_version(body: bytes, versions: Mapping[str, int]) -> tuple[bytes, str, int | None]:
    """Returns the body of a call for vLLM, its model, and the version that answers (None: unknown
    model). versions: `RequestHold.versions`; without an entry for the empty name they are versions
    of adapters, each with its own name at vLLM. The salt separates the prefix caches of
    versions."""
    try:
        fields = msgspec.json.decode(body, type=dict[str, msgspec.Raw])
        model = msgspec.json.decode(fields.get("model", b"null"), type=str | None) or ""
        salt = msgspec.json.decode(fields.get("cache_salt", b"null"))
    except msgspec.DecodeError:
        return body, "", versions.get("")
    version = versions.get(model, versions.get(""))
    if version is None:
        return body, model, None
    added = {"cache_salt": f"{version}.{salt}" if salt else str(version)}
    if "" not in versions:
        model = added["model"] = versioned(model, version)
    return msgspec.json.encode({**fields, **added}), model, version


async def _read(receive: Receive) -> bytes:
    """Read the whole body of a request."""
    body, more = b"", True
    while more:
        message = await receive()
        body, more = body + message.get("body", b""), message.get("more_body", False)
    return body


def main() -> None:
    die_with_parent()
    seal()
    KEYS.update((name, os.environ.pop(name, "")) for name in (KEY_VARIABLE, CALLERS_VARIABLE))
    runpy.run_module("vllm.entrypoints.openai.api_server", run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    # The instance of this module that vLLM imports.
    from agentrl.algorithms.engines.vllm import child

    child.main()
