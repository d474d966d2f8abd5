"""A policy server that answers what a case wrote down for it, over HTTP, with token ids."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any
from zlib import crc32

from aiohttp import web

Body = dict[str, Any]


def token(text: str) -> int:
    return crc32(text.encode()) % 1000


def pieces(text: str) -> list[str]:
    """What a stream sends at once, and what is a token: a word with the space before it."""
    return re.findall(r"\s*\S+|\s+$", text)


@dataclass
class Scripted:
    """What the next call is answered with.

    fields: changes of the choice, such as {"finish_reason": "length"}. status and error: instead of
    an answer. ids: whether token ids are known. cut: the stream ends after this many events."""

    content: str | None = None
    calls: list[tuple[str, str, str]] = field(default_factory=list)  # id, name, arguments
    thought: str = ""
    fields: Body = field(default_factory=dict)
    status: int = 200
    error: Body | str | None = None
    ids: bool = True
    cut: int | None = None
    more: Body = field(default_factory=dict)  # of the message

    @property
    def message(self) -> Body:
        message: Body = {"role": "assistant", "content": self.content, **self.more}
        if self.thought:
            message["reasoning_content"] = self.thought
        if self.calls:
            message["tool_calls"] = [
                {"id": id, "type": "function", "function": {"name": name, "arguments": arguments}}
                for id, name, arguments in self.calls
            ]
        return message

    @property
    def finish(self) -> str:
        return str(self.fields.get("finish_reason", "tool_calls" if self.calls else "stop"))

    @property
    def tokens(self) -> list[str]:
        text = self.thought + (self.content or "")
        return pieces(text + "".join(f" {name} {arguments}" for _, name, arguments in self.calls))


class Engine:
    """Serves chat completions by a script for each key in the prompt's metadata."""

    def __init__(self) -> None:
        self.script: list[Scripted] = []
        self.requests: list[Body] = []

    async def start(self) -> str:
        app = web.Application(client_max_size=2**26)
        app.router.add_post("/v1/chat/completions", self.chat)
        app.router.add_post("/v1/completions", self.chat)
        app.router.add_post("/tokenize", self.tokenize)
        app.router.add_post("/v1/embeddings", self.embed)
        self.runner = web.AppRunner(app, shutdown_timeout=0.0)
        await self.runner.setup()
        site = web.TCPSite(self.runner, "127.0.0.1", 0)
        await site.start()
        (address,) = self.runner.addresses
        return f"http://127.0.0.1:{address[1]}/v1"

    async def stop(self) -> None:
        await self.runner.cleanup()

    async def tokenize(self, request: web.Request) -> web.Response:
        body = await request.json()
        if "x-agentrl-probe" not in request.headers:
            self.requests.append(body)
        count = len(json.dumps(body.get("messages")))
        return web.json_response({"count": count, "max_model_len": None})

    async def embed(self, request: web.Request) -> web.Response:
        self.requests.append(await request.json())
        data = [{"object": "embedding", "index": 0, "embedding": [0.5, -0.5]}]
        return web.json_response({"object": "list", "data": data, "model": "tiny"})

    async def chat(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        self.requests.append(body)
        reply = self.script.pop(0) if self.script else Scripted("Nothing is written.")
        headers = {"x-policy-version": "7"}
        if reply.error is not None and reply.cut is None:
            if isinstance(reply.error, str):
                return web.Response(text=reply.error, status=reply.status, headers=headers)
            return web.json_response(reply.error, status=reply.status, headers=headers)
        chat = request.path.endswith("chat/completions")
        if not body.get("stream"):
            return web.json_response(whole(reply, body, chat), headers=headers)
        response = web.StreamResponse(headers=headers | {"content-type": "text/event-stream"})
        await response.prepare(request)
        events = list(streamed(reply, body, chat))
        for event in events[: reply.cut]:
            await response.write(f"data: {json.dumps(event)}\n\n".encode())
        if reply.cut is None:
            await response.write(b"data: [DONE]\n\n")
        elif reply.error is not None:
            await response.write(f"data: {json.dumps(reply.error)}\n\n".encode())
        elif request.transport is not None:
            await asyncio.sleep(0.01)
            request.transport.close()
        return response


def usage(reply: Scripted) -> Body:
    n = len(reply.tokens)
    return {"prompt_tokens": 5, "completion_tokens": n, "total_tokens": 5 + n}


def prompt(reply: Scripted, body: Body) -> Body:
    if not (reply.ids and body.get("return_token_ids")):
        return {}
    read = json.dumps([body.get("messages"), body.get("prompt"), body.get("tools")])
    return {"prompt_token_ids": [1, token(read), 2]}


def sampled(reply: Scripted, body: Body, tokens: list[str], chat: bool) -> Body:
    found: Body = {}
    if body.get("logprobs"):
        values = [-round(token(text) / 400 + 0.01, 4) for text in tokens]
        entries = [
            {"token": text, "logprob": x, "bytes": list(text.encode()), "top_logprobs": []}
            for text, x in zip(tokens, values, strict=True)
        ]
        found["logprobs"] = (
            {"content": entries} if chat else {"token_logprobs": values, "tokens": tokens}
        )
    if reply.ids and body.get("return_token_ids"):
        found["token_ids"] = [token(text) for text in tokens]
    return found


def head(body: Body, kind: str) -> Body:
    return {"id": "chatcmpl-0001", "object": kind, "created": 1_700_000_000, "model": body["model"]}


def whole(reply: Scripted, body: Body, chat: bool) -> Body:
    choice: Body = {"index": 0, "finish_reason": reply.finish, "logprobs": None}
    choice |= {"message": reply.message} if chat else {"text": reply.content}
    choice |= {key: value for key, value in reply.fields.items() if key != "finish_reason"}
    choice |= sampled(reply, body, reply.tokens, chat)
    kind = "chat.completion" if chat else "text_completion"
    choices = [choice | {"index": i} for i in range(body.get("n") or 1)]
    return head(body, kind) | {"choices": choices, "usage": usage(reply)} | prompt(reply, body)


def streamed(reply: Scripted, body: Body, chat: bool) -> Iterator[Body]:
    base = head(body, "chat.completion.chunk" if chat else "text_completion")

    def chunk(delta: Body, finish: str | None = None, **more: Any) -> Body:
        choice: Body = {"index": 0, "finish_reason": finish, "logprobs": None}
        choice |= {"delta": delta} if chat else {"text": delta.get("content", "")}
        return base | {"choices": [choice | more]}

    if chat:
        yield chunk({"role": "assistant", "content": ""}) | prompt(reply, body)
    for text in pieces(reply.thought):
        yield chunk({"reasoning_content": text}, **sampled(reply, body, [text], chat))
    for number, text in enumerate(pieces(reply.content or "")):
        event = chunk({"content": text}, **sampled(reply, body, [text], chat))
        yield event if chat or number else event | prompt(reply, body)
    for number, (id, name, arguments) in enumerate(reply.calls):
        first = {"index": number, "id": id, "type": "function"}
        function = {"name": name, "arguments": ""}
        yield chunk(
            {"tool_calls": [first | {"function": function}]},
            **sampled(reply, body, [f" {name}"], chat),
        )
        for place, text in enumerate(pieces(f" {arguments}")):
            part = {"index": number, "function": {"arguments": text[not place :]}}
            yield chunk({"tool_calls": [part]}, **sampled(reply, body, [text], chat))
    if reply.more:
        yield chunk(dict(reply.more))
    yield chunk({}, reply.finish)
    if (body.get("stream_options") or {}).get("include_usage"):
        yield base | {"choices": [], "usage": usage(reply)}
