"""HTTP routes of the gateway. Errors have the format of the API that the agent called."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from functools import partial

import msgspec
from aiohttp import web

from agentrl.base import otlp
from agentrl.base.http_server import read_body
from agentrl.runners.dialects.conversation import Body
from agentrl.runners.gateway import apis
from agentrl.runners.gateway.attribution import (
    AttemptRegistry,
    CallOrigin,
    Handler,
    Work,
    answering_errors,
)
from agentrl.runners.gateway.handler import answer_call
from agentrl.runners.gateway.refusals import RefusedError, told
from agentrl.runners.gateway.request import forwarded
from agentrl.runners.gateway.response import read
from agentrl.runners.gateway.upstream import Route, Router, Upstream
from agentrl.store.base import Store
from agentrl.types import Span

LARGEST_REQUEST = 256 * 2**20  # bytes of a request
FOREIGN = "spans of traces other than the attempt's own are not taken"
# What is answered beside calls of models, for an error.
OTHERS = [f"POST /v1/{name}" for name in ("embeddings", "traces", "logs", "metrics")]
OTHERS += ["GET /v1/models", "GET /v1/models/{model}"]
PREFIXES = ("", "/a/{attempt}", "/a/{attempt}/{role}")


class Endpoints:
    """Request handlers, each on behalf of one active attempt."""

    def __init__(
        self, attempts: AttemptRegistry, router: Router, upstream: Upstream, store: Store
    ) -> None:
        self._attempts, self._router, self.upstream = attempts, router, upstream
        self._store, self.call = store, partial(answer_call, upstream, store)

    def add_to(self, app: web.Application) -> None:
        app.middlewares.append(answering_errors(in_its_format))
        within, translated = self._attempts.within, apis.TRANSLATED.items()
        posts: dict[str, Work] = {
            **{path: partial(self.call, dialect) for path, dialect in apis.OWN.items()},
            **{path: partial(api.answer, self) for path, api in translated if api.answer},
            "/v1/embeddings": self.embeddings,
            "/v1/traces": self.spans,
            "/v1/logs": discard_telemetry,
            "/v1/metrics": discard_telemetry,
        }
        others = [
            (method, path, partial(answer, self))
            for path, api in translated
            for method, answer in api.others.items()
        ]
        gets: dict[str, Handler] = {path: api.get for path, api in translated if api.get}
        gets |= {"/v1/models": self.models, "/v1/models/{model}": self.models}
        for prefix in PREFIXES:
            for path, work in posts.items():
                app.router.add_post(f"{prefix}{path}", partial(within, work))
            for method, path, work in others:
                app.router.add_route(method, f"{prefix}{path}", partial(within, work))
            for path, answer in gets.items():
                app.router.add_get(f"{prefix}{path}", answer)
            app.router.add_head(prefix or "/", alive)

    async def spans(self, caller: CallOrigin, request: web.Request) -> web.StreamResponse:
        """Store spans of the caller's own attempt; reject others."""
        active = caller.active

        async def add(spans: list[Span]) -> tuple[int, str]:
            own = [span for span in spans if span.attempt == active.id and active.recorded]
            if own:
                await self._store.add_spans(own)
            foreign = len(spans) - len(own)
            return foreign, FOREIGN if foreign else ""

        body, kind = await otlp.receive(await read_body(request), request.content_type, add)
        return web.Response(body=body, content_type=kind)

    async def models(self, request: web.Request) -> web.StreamResponse:
        if not self._attempts.open:
            self._attempts.caller(request.headers, request.match_info)
        await self._router.read.wait()  # harnesses list models at start and cache an empty list
        served = self._router.policies
        names = sorted({*served, *(p.model for p in served.values()), *self._router.frozen})
        model = request.match_info.get("model")
        if model is not None and model not in names:
            why = f"there is no model {model!r:.80}; there is {', '.join(map(repr, names))}"
            raise RefusedError(404, "model_not_found", why)
        api = apis.client_api(request)
        list_of = openai_models if api is None or api.models is None else api.models
        listed = list_of(names)
        return web.json_response(listed if model is None else listed["data"][names.index(model)])

    # -- calls that are routed and retried like any other, but not recorded ------------------------

    async def embeddings(self, caller: CallOrigin, request: web.Request) -> web.StreamResponse:
        raw = await read_body(request)
        fields = msgspec.json.decode(raw, type=dict[str, msgspec.Raw])
        model = msgspec.json.decode(fields.get("model", b'""'), type=str)

        async def once(route: Route) -> web.StreamResponse:
            body = msgspec.json.encode(fields | {"model": route.model or model})
            async with self.upstream.post(route, "embeddings", body, request.headers) as reply:
                headers = forwarded(reply.headers)
                return web.Response(status=reply.status, body=await read(reply), headers=headers)

        return await self.unrecorded(caller, raw, model, "embeddings", once)

    async def unrecorded(
        self,
        caller: CallOrigin,
        raw: bytes,
        model: str,
        api: str,
        once: Callable[[Route], Awaitable[web.StreamResponse]],
    ) -> web.StreamResponse:
        """Answer a call with the body `raw` as `once` does, which tries a route. `api`: what it
        calls, for an error."""
        active = caller.active
        call = active.begin_call(raw)
        try:
            async with asyncio.timeout(active.left):
                return await self.upstream.retry(caller, model, call, once)
        except TimeoutError:
            raise active.time_is_up(api) from None
        finally:
            active.call_ended(call)


def openai_models(names: Sequence[str]) -> Body:
    about: Body = {"object": "model", "created": 0, "owned_by": "agentrl"}
    return {"object": "list", "data": [{"id": name} | about for name in names]}


async def discard_telemetry(caller: CallOrigin, request: web.Request) -> web.StreamResponse:
    await read_body(request)
    body, kind = otlp.discard(request.content_type)
    return web.Response(body=body, content_type=kind)


async def alive(request: web.Request) -> web.StreamResponse:
    return web.Response()


def in_its_format(request: web.Request, error: BaseException) -> web.Response:
    """An error in the format of the API that was called."""
    return told(request, error, apis.dialect_of(request), [*apis.listed(), *OTHERS])
