"""HTTP routes of the gateway. Errors have the format of the API that the agent called."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from functools import partial

import msgspec
from aiohttp import web

from agentrl.base.http_server import read_body
from agentrl.base.parts import installed_plugins, known, missing
from agentrl.base.span_names import Receive
from agentrl.runners import dialects
from agentrl.runners.dialects.conversation import Body
from agentrl.runners.gateway.attribution import (
    AttemptRegistry,
    CallOrigin,
    Handler,
    Work,
    tell_errors,
)
from agentrl.runners.gateway.handler import answer_call
from agentrl.runners.gateway.refusals import RefusedError
from agentrl.runners.gateway.request import forwarded
from agentrl.runners.gateway.response import read
from agentrl.runners.gateway.upstream import Route, Router, Upstream
from agentrl.store.base import Store
from agentrl.types import Span

LARGEST_REQUEST = 256 * 2**20  # bytes of a request
FOREIGN = "spans of traces other than the attempt's own are not taken"
PREFIXES = ("", "/a/{attempt}", "/a/{attempt}/{role}")


class Endpoints:
    """Request handlers, each on behalf of one active attempt."""

    def __init__(
        self, attempts: AttemptRegistry, router: Router, upstream: Upstream, store: Store
    ) -> None:
        self._attempts, self._router, self.upstream = attempts, router, upstream
        self._store, self.call = store, partial(answer_call, upstream, store)

    def add_to(self, app: web.Application) -> None:
        app.middlewares.append(tell_errors)
        within, apis = self._attempts.within, dialects.model_apis()
        posts: dict[str, Work] = {
            **{path: partial(self.call, dialect) for path, dialect in dialects.OWN.items()},
            **{path: partial(api.answer, self) for path, api in apis.items() if api.answer},
            **{one.name: partial(self.spans, one.load()) for one in installed_plugins("spans")},
            "/v1/embeddings": self.embeddings,
        }
        others = [
            (method, path, partial(answer, self))
            for path, api in apis.items()
            for method, answer in api.others.items()
        ]
        refused = {path: kind for kind in ("dialects", "spans") for path in known(kind)}
        refused = {path: refused[path] for path in refused.keys() - posts.keys() - apis.keys()}
        gets: dict[str, Handler] = {path: api.get for path, api in apis.items() if api.get}
        gets |= {"/v1/models": self.models, "/v1/models/{model}": self.models}
        for prefix in PREFIXES:
            for path, work in posts.items():
                app.router.add_post(f"{prefix}{path}", partial(within, work))
            for method, path, work in others:
                app.router.add_route(method, f"{prefix}{path}", partial(within, work))
            for path, kind in refused.items():
                app.router.add_post(f"{prefix}{path}", partial(without_part, kind, path))
            for path, answer in gets.items():
                app.router.add_get(f"{prefix}{path}", answer)
            app.router.add_head(prefix or "/", alive)

    async def spans(
        self, receive: Receive, caller: CallOrigin, request: web.Request
    ) -> web.StreamResponse:
        """Store spans of the caller's own attempt; reject others."""
        active = caller.active

        async def add(spans: list[Span]) -> tuple[int, str]:
            own = [span for span in spans if span.attempt == active.id and active.recorded]
            if own:
                await self._store.add_spans(own)
            foreign = len(spans) - len(own)
            return foreign, FOREIGN if foreign else ""

        body, kind = await receive(await read_body(request), request.content_type, add)
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
        api = dialects.client_api(request)
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


async def without_part(kind: str, path: str, request: web.Request) -> web.StreamResponse:
    """Refuse what a part would answer that is not installed."""
    raise RefusedError(404, "unknown_url", f"POST {path}: {missing(kind, path)}")


async def alive(request: web.Request) -> web.StreamResponse:
    return web.Response()
