"""Calls that nothing is learned from: routed and repeated as any other, and not recorded."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import msgspec
from aiohttp import web

from agentrl.http_server import read_body
from agentrl.runners.dialects import messages
from agentrl.runners.dialects.base import Body
from agentrl.runners.gateway.attribution import CallOrigin, RefusedError
from agentrl.runners.gateway.handler import translate_error
from agentrl.runners.gateway.routing import Route
from agentrl.runners.gateway.upstream import Upstream, UpstreamError, forwarded_headers, read


class _Count(msgspec.Struct):
    """What vLLM and the embedded server answer to /tokenize, as far as it is read."""

    count: int


_count = msgspec.json.Decoder(_Count)


async def embeddings(
    upstream: Upstream, caller: CallOrigin, request: web.Request
) -> web.StreamResponse:
    raw = await read_body(request)
    fields = msgspec.json.decode(raw, type=dict[str, msgspec.Raw])
    model = msgspec.json.decode(fields.get("model", b'""'), type=str)

    async def once(route: Route) -> web.StreamResponse:
        body = msgspec.json.encode(fields | {"model": route.model or model})
        async with upstream.post(route, "embeddings", body, request.headers) as reply:
            headers = forwarded_headers(reply.headers)
            return web.Response(status=reply.status, body=await read(reply), headers=headers)

    return await _answer(upstream, caller, raw, model, "embeddings", once)


async def count_tokens(
    upstream: Upstream, caller: CallOrigin, request: web.Request
) -> web.StreamResponse:
    """How long the prompt of a request in Anthropic's words would be: the server renders it.

    Source: https://docs.anthropic.com/en/api/messages-count-tokens"""
    raw = await read_body(request)
    chat = messages.prompt_of(msgspec.json.decode(raw, type=Body), caller.attempt.memory)
    model = str(chat.get("model") or "")

    async def once(route: Route) -> web.StreamResponse:
        body = msgspec.json.encode(chat | {"model": route.model or model})
        server = route._replace(base_url=route.base_url.removesuffix("/v1"))
        try:
            async with upstream.post(server, "tokenize", body, request.headers) as reply:
                status, found = reply.status, await read(reply)
        except UpstreamError as error:
            if not (route.frozen and error.final):
                raise
            raise _not_countable(route) from None
        if status in (400, 422):
            words = translate_error(messages.DIALECT, status, found)
            return web.Response(status=status, body=words, content_type="application/json")
        try:
            return web.json_response({"input_tokens": _count.decode(found).count})
        except msgspec.DecodeError:
            raise _not_countable(route) from None

    return await _answer(upstream, caller, raw, model, "count_tokens", once)


def _not_countable(route: Route) -> RefusedError:
    why = f"the endpoint {route.policy!r} does not tell how many tokens a prompt has"
    return RefusedError(404, "not_counted", f"{why}; estimate it, or leave it out")


async def _answer(
    upstream: Upstream,
    caller: CallOrigin,
    raw: bytes,
    model: str,
    api: str,
    once: Callable[[Route], Awaitable[web.StreamResponse]],
) -> web.StreamResponse:
    """Within the attempt's time."""
    active = caller.attempt
    asked = active.begin_call(raw)
    try:
        async with asyncio.timeout(active.left):
            return await upstream.retry(caller, model, asked, once)
    except TimeoutError:
        message = f"attempt {active.id} ran out of time before {api} had answered"
        raise RefusedError(504, "attempt_timeout", message) from None
    finally:
        active.done(asked)
