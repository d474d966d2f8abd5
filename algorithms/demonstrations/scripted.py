"""A Python function that answers chat messages, as a server of OpenAI's chat completions."""

from __future__ import annotations

import json
import time
import traceback
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any
from uuid import uuid4

from aiohttp import web

from agentrl.base import user_code
from agentrl.base.http_server import listen, read_body
from agentrl.base.loading import load_attribute
from agentrl.errors import ConfigError

Script = Callable[..., Any]
USAGE = {"prompt_tokens": 0, "completion_tokens": 0, "total_tokens": 0}


def load_script(path: str, root: Path) -> Script:
    """The function that `path` ("file.py:name") names. Raises ConfigError if there is none."""
    script = load_attribute(path, root, key="--script")
    if not callable(script):
        raise ConfigError(f"--script = {path!r}: it is not a function of messages and tools")
    function: Script = script
    return function


@asynccontextmanager
async def served(script: Script, name: str) -> AsyncIterator[str]:
    """Context in which `script(messages, tools)` answers; the value is the base URL. It returns a
    text, or a message with `content` and `tool_calls`, of which each may be just {"name":
    ..., "arguments": ...}."""

    async def complete(request: web.Request) -> web.StreamResponse:
        body = json.loads(await read_body(request))
        try:
            said = await user_code.in_thread(script, body["messages"], body.get("tools") or [])
            message = message_of(said)
        except Exception as error:  # noqa: BLE001 - the user's function is a boundary
            last = traceback.extract_tb(user_code.cause_of(error).__traceback__)[-1]
            why = f"{user_code.text_of(error)} ({last.filename}:{last.lineno})"
            return web.json_response({"error": {"message": f"{name} raised {why}"}}, status=400)
        finish = "tool_calls" if message.get("tool_calls") else "stop"
        card = {"id": f"chatcmpl-{uuid4().hex}", "created": int(time.time()), "model": name}
        if not body.get("stream"):
            choice = {"index": 0, "message": message, "finish_reason": finish}
            whole = {"object": "chat.completion", "choices": [choice], "usage": USAGE}
            return web.json_response(card | whole)
        for number, call in enumerate(message.get("tool_calls") or ()):
            call["index"] = number
        choice = {"index": 0, "delta": message, "finish_reason": finish}
        chunk = card | {"object": "chat.completion.chunk", "choices": [choice]}
        events = f"data: {json.dumps(chunk)}\n\ndata: [DONE]\n\n"
        return web.Response(text=events, content_type="text/event-stream")

    app = web.Application(client_max_size=64 * 2**20)
    app.router.add_post("/v1/chat/completions", complete)
    runner, url = await listen(app, "127.0.0.1", 0)
    try:
        yield f"{url}/v1"
    finally:
        await runner.cleanup()


def message_of(said: Any) -> dict[str, Any]:
    """A message of the assistant from what a script returns. Raises TypeError for other values."""
    if isinstance(said, str):
        return {"role": "assistant", "content": said}
    if not isinstance(said, dict):
        raise TypeError(f"it returned {said!r:.80}, neither text nor a message")
    message: dict[str, Any] = {"role": "assistant", "content": None, **said}
    if calls := said.get("tool_calls"):
        message["tool_calls"] = [_call(one) for one in calls]
    return message


def _call(given: dict[str, Any]) -> dict[str, Any]:
    function = given.get("function", given)
    arguments = function.get("arguments", {})
    text = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
    named = {"name": function["name"], "arguments": text}
    return {"id": given.get("id") or f"call_{uuid4().hex}", "type": "function", "function": named}
