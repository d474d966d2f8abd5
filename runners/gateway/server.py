"""The gateway: an HTTP server in the worker's process with the model APIs for agents.

Errors have the format of the API that the agent called.

Owns: a thread with its own event loop, which an agent that blocks the worker's loop does not block;
the listening socket; the connections to the policy servers.
Invariant: a call without an active attempt is refused; a call is durable before the last byte of
its response is sent; a response that was not stored is not delivered.
Writers: the worker registers attempts; the store is written only through `add_transitions` and
`add_spans`, and only for the caller's own attempt.
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import socket
import threading
from collections.abc import Awaitable, Callable, Collection, Coroutine, Iterator, Mapping, Sequence
from concurrent.futures import Future
from functools import partial
from typing import Any

import msgspec
from aiohttp import web
from msgspec.structs import replace

from agentrl.core import otlp
from agentrl.core.access import ANYBODY, Access, is_loopback
from agentrl.core.config import UpstreamConfig
from agentrl.core.errors import ConfigError
from agentrl.core.http import listen, read_body, server_loop
from agentrl.core.processes import allow_files
from agentrl.core.types import Attempt, Span
from agentrl.runners.apis.chat import Body
from agentrl.runners.gateway import apis
from agentrl.runners.gateway.attribution import (
    ActiveAttempt,
    AttemptRegistry,
    CallOrigin,
    Handler,
    Work,
    answering_errors,
)
from agentrl.runners.gateway.features import Feature
from agentrl.runners.gateway.handler import answer_call
from agentrl.runners.gateway.refusals import RefusedError, error_response
from agentrl.runners.gateway.request import forwarded
from agentrl.runners.gateway.response import read
from agentrl.runners.gateway.upstream import Route, Router, Upstream
from agentrl.store.base import Store

MAX_REQUEST_BYTES = 256 * 2**20  # bytes of a request
FOREIGN = "spans of traces other than the attempt's own are rejected"
# Endpoints besides model calls, to be listed in an error.
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
        for path in ("/v1/models", "/v1beta/models"):
            gets |= {path: self.models, f"{path}/{{model}}": self.models}
        for prefix in PREFIXES:
            for path, work in posts.items():
                app.router.add_post(f"{prefix}{path}", partial(within, work))
            for method, path, work in others:
                app.router.add_route(method, f"{prefix}{path}", partial(within, work))
            for path, answer in gets.items():
                app.router.add_get(f"{prefix}{path}", answer)
            app.router.add_head(prefix or "/", alive)

    async def spans(self, caller: CallOrigin, request: web.Request) -> web.StreamResponse:
        """Store spans of the caller's attempt; reject others."""
        active = caller.active

        async def add(spans: list[Span]) -> tuple[int, str]:
            accepted = [span for span in spans if span.attempt == active.id and active.recorded]
            if accepted:
                await self._store.add_spans(accepted)
            foreign = len(spans) - len(accepted)
            return foreign, FOREIGN if foreign else ""

        sent = await read_body(request, spans=True)
        body, kind = await otlp.receive(sent, request.content_type, add)
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
        if model is None:
            return web.json_response(list_of(names))
        (one,) = next(value for value in list_of([model]).values() if isinstance(value, list))
        return web.json_response(one)

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
        """Answer an unrecorded call with the body `raw` by `once`, which tries one route. `api`:
        name of the endpoint, for errors."""
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
    return error_response(request, error, apis.dialect_of(request), [*apis.listed(), *OTHERS])


STORE_TIMEOUT = 5.0  # seconds for aborted calls to store their partial responses


class Gateway:
    """The server: start it, register attempts, and point agents at `base_url`."""

    def __init__(
        self,
        store: Store,
        run: str,
        *,
        host: str = "127.0.0.1",
        port: int = 0,
        upstreams: Mapping[str, UpstreamConfig] | None = None,
        roles: Mapping[str, str] | None = None,
        policies: Collection[str] = (),
        remote: bool = False,
        key: str = "",
        models: Collection[str] = (),
        features: Sequence[Feature] = (),
        access: Access = ANYBODY,
        socket: socket.socket | None = None,
    ) -> None:
        """`upstreams` to `models`: see `Router`. `features`: in the order in which they process a
        call. `access`: the certificate, and the keys, which a feature checks. `socket`: one that
        already listens, in place of `host` and `port`. If other machines can connect to `host`,
        only sealed attempts accept calls.

        Raises ConfigError if the API key of an upstream is missing."""
        self.base_url = ""  # for agents on this machine, set by `start`; ends in /v1
        self.port = port
        self.attempts = AttemptRegistry(
            open=is_loopback(host), roles=roles or (), features=features
        )
        self.router = Router(
            store, run, upstreams, roles, policies, remote=remote, key=key, models=models
        )
        self._store, self._host, self._features = store, host, features
        self._access, self._socket = access, socket
        self._loop = server_loop()
        self._thread = threading.Thread(target=self._serve, name="agentrl-gateway", daemon=True)
        self._listening: Future[int] = Future()
        self._stop = asyncio.Event()

    def start(self) -> None:
        """Start listening. Raises ConfigError if the port is taken."""
        allow_files()  # a call in flight has two file descriptors
        self._thread.start()
        try:
            port = self._listening.result()
        except OSError as error:
            self._thread.join()
            raise ConfigError(
                f"runner.port = {self.port}: the gateway cannot listen there"
                f" ({error.strerror or error}); choose another port, or 0 for any free one"
            ) from error
        self.port = port
        host = "127.0.0.1" if self._host in ("", "0.0.0.0") else self._host
        host = "[::1]" if host == "::" else f"[{host}]" if ":" in host else host
        scheme = "https" if self._access.certfile else "http"
        self.base_url = f"{scheme}://{host}:{port}/v1"

    def close(self) -> None:
        """Reject new calls, abort calls in flight, end the thread."""
        if self._thread.is_alive():
            self._loop.call_soon_threadsafe(self._stop.set)
            self._thread.join()

    def register(self, attempt: Attempt, *, sealed: bool = False) -> ActiveAttempt:
        """Accept calls of `attempt` and start its timer. A sealed attempt accepts only calls with
        its `key`, the only secret that code outside this process may have."""
        return self.attempts.register(attempt, sealed=sealed)

    def unregister(self, active: ActiveAttempt) -> Future[None]:
        """Reject later calls of an attempt and abort those in flight. The future is done when their
        partial responses are stored."""
        self.attempts.unregister(active.id)
        if self._loop.is_closed():  # no calls are in flight
            over: Future[None] = Future()
            over.set_result(None)
            return over
        return self.spawn(_abort_calls(active))  # after earlier calls have entered `tasks`

    @contextlib.contextmanager
    def scoring(self, attempt: Attempt) -> Iterator[str]:
        """Let the verifier of `attempt` call frozen endpoints, such as a judge, in the trace whose
        id is yielded. The verifier cannot call policies, and its calls are not recorded, because
        the policy must not be trained on a verifier's samples."""
        trace = secrets.token_hex(16)  # a new id, which late calls of the agent do not know
        attempt = replace(attempt, id=trace, prompts=[])
        active = self.attempts.register(attempt, scoring=True)
        try:
            yield active.id
        finally:
            self.unregister(active)

    def spawn(self, work: Coroutine[Any, Any, None]) -> Future[None]:
        """Run `work` on the server's event loop, which no agent can block."""
        return asyncio.run_coroutine_threadsafe(work, self._loop)

    def _serve(self) -> None:
        with asyncio.Runner(loop_factory=lambda: self._loop) as runner:
            runner.run(self._main())

    async def _main(self) -> None:
        upstream, app = Upstream(self.router), web.Application(client_max_size=MAX_REQUEST_BYTES)
        for feature in self._features:
            feature.add_to(app, upstream)
        Endpoints(self.attempts, self.router, upstream, self._store).add_to(app)
        following, runner = asyncio.create_task(self.router.follow()), None
        try:
            try:
                runner, _ = await listen(
                    app,
                    self._host,
                    self.port,
                    shutdown=0.0,
                    access=self._access,
                    socket=self._socket,
                )
            except OSError as error:
                self._listening.set_exception(error)
                return
            self._listening.set_result(runner.addresses[0][1])
            stopping = asyncio.create_task(self._stop.wait())
            await asyncio.wait((stopping, following), return_when=asyncio.FIRST_COMPLETED)
        finally:
            following.cancel()
            await asyncio.gather(*map(_abort_calls, self.attempts.active()))
            if runner is not None:
                await runner.cleanup()
            await upstream.session.close()
            with contextlib.suppress(asyncio.CancelledError):
                await following


async def _abort_calls(active: ActiveAttempt) -> None:
    for task in active.tasks:
        task.cancel()
    if active.tasks:
        await asyncio.wait(active.tasks, timeout=STORE_TIMEOUT)
