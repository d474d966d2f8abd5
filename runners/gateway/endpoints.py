"""HTTP routes of the gateway. Errors have the format of the API that the agent called."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from functools import partial

import msgspec
from aiohttp import web

from agentrl.base.http_server import read_body
from agentrl.runners import dialects
from agentrl.runners.dialects import DIALECTS, UntranslatableError
from agentrl.runners.dialects.conversation import Body, ConversationMemory
from agentrl.runners.gateway.attribution import AttemptRegistry, CallOrigin, tell_errors
from agentrl.runners.gateway.handler import answer_call
from agentrl.runners.gateway.prompt_size import RefusedPromptError, prompt_size
from agentrl.runners.gateway.refusals import RefusedError, UpstreamError, translate_error
from agentrl.runners.gateway.request import forwarded
from agentrl.runners.gateway.response import read
from agentrl.runners.gateway.upstream import Route, Router, Upstream
from agentrl.store.base import Store

LARGEST = 256 * 2**20  # bytes of a request
PREFIXES = ("", "/a/{attempt}", "/a/{attempt}/{role}")


class Endpoints:
    """Request handlers, each on behalf of one active attempt."""

    def __init__(
        self, attempts: AttemptRegistry, router: Router, upstream: Upstream, store: Store
    ) -> None:
        self._attempts, self._router, self._upstream = attempts, router, upstream
        self._store, self._call = store, partial(answer_call, upstream, store)

    def add_to(self, app: web.Application) -> None:
        app.middlewares.append(tell_errors)
        within = self._attempts.within
        for prefix in PREFIXES:
            for dialect in DIALECTS:
                call = partial(within, partial(self._call, dialect))
                app.router.add_post(f"{prefix}/v1/{dialect.route}", call)
            for route, work in (
                ("messages/count_tokens", self.count_tokens),
                ("embeddings", partial(embeddings, self._upstream)),
                ("traces", self.traces),
                ("logs", drop),
                ("metrics", drop),
            ):
                app.router.add_post(f"{prefix}/v1/{route}", partial(within, work))
            for version in ("v1", "v1beta"):
                google = partial(within, self.google)
                app.router.add_post(f"{prefix}/{version}/models/{{model}}:{{verb}}", google)
            app.router.add_get(f"{prefix}/v1/models", self.models)
            app.router.add_get(f"{prefix}/v1/models/{{model}}", self.models)
            app.router.add_get(f"{prefix}/v1/responses", no_websocket)
            app.router.add_head(prefix or "/", alive)

    async def count_tokens(self, caller: CallOrigin, request: web.Request) -> web.StreamResponse:
        """https://docs.anthropic.com/en/api/messages-count-tokens"""
        prompt_of = dialects.messages.prompt_of
        return await count_tokens(self._upstream, caller, request, prompt_of, "input_tokens")

    async def google(self, caller: CallOrigin, request: web.Request) -> web.StreamResponse:
        """Call a method of Google's API, whose path names the model."""
        model, verb = request.match_info["model"], request.match_info["verb"]
        if verb == "countTokens":
            prompt_of = partial(dialects.google.prompt_of, model=model)
            return await count_tokens(self._upstream, caller, request, prompt_of, "totalTokens")
        stream = verb == "streamGenerateContent"
        if verb not in ("generateContent", "streamGenerateContent"):
            raise UntranslatableError(
                verb, "there is generateContent, streamGenerateContent and countTokens", status=404
            )
        if stream and request.query.get("alt") != "sse":
            raise UntranslatableError("alt", "a stream is sent as events only; add ?alt=sse")
        return await self._call(dialects.google.dialect(model, stream=stream), caller, request)

    async def traces(self, caller: CallOrigin, request: web.Request) -> web.StreamResponse:
        """Store spans of the caller's own attempt; reject others as OTLP prescribes."""
        from agentrl.base import otlp  # needs the extra with OpenTelemetry's protobuf messages

        spans, unusable, why = otlp.decode_some(await read_body(request), request.content_type)
        active = caller.attempt
        own = [span for span in spans if span.attempt == active.id and not active.scoring]
        if own:
            await self._store.add_spans(own)
        if foreign := len(spans) - len(own):
            why = "spans of traces other than the attempt's own are not taken"
        body, kind = otlp.success(request.content_type, foreign + unusable, why)
        return web.Response(body=body, content_type=kind)

    async def models(self, request: web.Request) -> web.StreamResponse:
        if not self._attempts.open:
            self._attempts.caller(request.headers, request.match_info)
        await self._router.read.wait()  # harnesses list models at start and cache an empty list
        served = self._router.policies
        names = sorted({*served, *(p.model for p in served.values()), *self._router.frozen})
        asked = request.match_info.get("model")
        if asked is not None and asked not in names:
            why = f"there is no model {asked!r:.80}; there is {', '.join(map(repr, names))}"
            raise RefusedError(404, "model_not_found", why)
        about: Body = {"object": "model", "created": 0, "owned_by": "agentrl"}
        head: Body = {"object": "list"}
        if anthropic := "anthropic-version" in request.headers:
            about = {"type": "model", "created_at": "1970-01-01T00:00:00Z"}
            ends = {"first_id": names[0], "last_id": names[-1]} if names else {}
            head = {"has_more": False} | ends
        data = [{"id": n} | ({"display_name": n} if anthropic else {}) | about for n in names]
        if asked is not None:
            return web.json_response(data[names.index(asked)])
        return web.json_response(head | {"data": data})


async def drop(caller: CallOrigin, request: web.Request) -> web.StreamResponse:
    """Accept OpenTelemetry logs and metrics and discard them: an agent would retry after a refusal,
    and training does not use them."""
    await read_body(request)
    empty = b"{}" if request.content_type == "application/json" else b""
    return web.Response(body=empty, content_type=request.content_type)


async def no_websocket(request: web.Request) -> web.StreamResponse:
    """Refuse a websocket at once; the agent then falls back to POST."""
    raise RefusedError(426, "no_websocket", "there are no websockets here; POST the call instead")


async def alive(request: web.Request) -> web.StreamResponse:
    return web.Response()


# -- calls that are routed and retried like any other, but not recorded ----------------------------


async def embeddings(
    upstream: Upstream, caller: CallOrigin, request: web.Request
) -> web.StreamResponse:
    raw = await read_body(request)
    fields = msgspec.json.decode(raw, type=dict[str, msgspec.Raw])
    model = msgspec.json.decode(fields.get("model", b'""'), type=str)

    async def once(route: Route) -> web.StreamResponse:
        body = msgspec.json.encode(fields | {"model": route.model or model})
        async with upstream.post(route, "embeddings", body, request.headers) as reply:
            headers = forwarded(reply.headers)
            return web.Response(status=reply.status, body=await read(reply), headers=headers)

    return await _unrecorded(upstream, caller, raw, model, "embeddings", once)


async def count_tokens(
    upstream: Upstream,
    caller: CallOrigin,
    request: web.Request,
    prompt_of: Callable[[Body, ConversationMemory], Body],
    field: str,
) -> web.StreamResponse:
    """Count a request's prompt tokens as rendered by the policy server. `prompt_of` converts it to
    a chat completion request; `field`: name of the count in the response."""
    raw = await read_body(request)
    chat = prompt_of(msgspec.json.decode(raw, type=Body), caller.attempt.memory)
    model = str(chat.get("model") or "")

    async def once(route: Route) -> web.StreamResponse:
        asked = chat | {"messages": await upstream.adapt(route, chat["messages"])}
        try:
            size = await prompt_size(upstream, route, asked, request.headers)
        except RefusedPromptError as error:
            dialect = dialects.of(request.path, anthropic=True)
            words = translate_error(dialect, error.status, error.words)
            return web.Response(status=error.status, body=words, content_type="application/json")
        except (LookupError, UpstreamError) as error:
            if isinstance(error, UpstreamError) and not (route.frozen and error.final):
                raise
            why = f"the endpoint {route.policy!r} does not tell how many tokens a prompt has"
            why = f"{why}; estimate it, or leave it out"
            raise RefusedError(404, "not_counted", why) from None
        return web.json_response({field: size.count})

    return await _unrecorded(upstream, caller, raw, model, "count_tokens", once)


async def _unrecorded(
    upstream: Upstream,
    caller: CallOrigin,
    raw: bytes,
    model: str,
    api: str,
    once: Callable[[Route], Awaitable[web.StreamResponse]],
) -> web.StreamResponse:
    active = caller.attempt
    asked = active.begin_call(raw)
    try:
        async with asyncio.timeout(active.left):
            return await upstream.retry(caller, model, asked, once)
    except TimeoutError:
        raise active.time_is_up(api) from None
    finally:
        active.done(asked)
