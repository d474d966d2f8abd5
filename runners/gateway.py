"""The model as the agents see it: an OpenAI-compatible server beside the worker.

Owns: a thread with its own event loop, so that an agent that blocks its loop blocks nothing here;
the listening socket; the connections to the policy servers.
Always true: a call that belongs to no live attempt is refused; the transition of a call is
durable before the last byte of its answer leaves; an answer that was not stored is not given.
Who may write: the worker registers attempts; the store is written only through `add_transitions`.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Awaitable, Callable, Coroutine
from concurrent.futures import Future
from typing import Any

import msgspec
from aiohttp import web

from agentrl.errors import ConfigError
from agentrl.runners.attribution import Attempts, Live, RefusedError
from agentrl.runners.capture import CHAT, TEXT
from agentrl.runners.exchange import Exchange
from agentrl.runners.routing import Router
from agentrl.runners.upstream import Upstream, UpstreamError
from agentrl.store.base import Store
from agentrl.types import Attempt

LARGEST = 256 * 2**20  # bytes of a request
BACKLOG = 4096  # connections that may wait to be accepted
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class Gateway:
    """Start it, register attempts, and point agents at `base_url`."""

    def __init__(self, store: Store, run: str, *, host: str = "127.0.0.1", port: int = 0) -> None:
        self.base_url = ""  # known once started; ends in /v1
        self.attempts = Attempts()
        self.router = Router(store, run)
        self._store, self._host, self._port = store, host, port
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._serve, name="agentrl-gateway", daemon=True)
        self._listening: Future[int] = Future()
        self._stop = asyncio.Event()

    def start(self) -> None:
        """Returns when it listens. Raises ConfigError when the port is taken."""
        self._thread.start()
        try:
            port = self._listening.result()
        except OSError as error:
            self._thread.join()
            raise ConfigError(
                f"runner.port = {self._port}: the gateway cannot listen there"
                f" ({error.strerror or error}); choose another port, or 0 for any free one"
            ) from error
        self.base_url = f"http://127.0.0.1:{port}/v1"

    def close(self) -> None:
        """Refuse new calls, cut those in flight, end the thread."""
        if self._thread.is_alive():
            self._loop.call_soon_threadsafe(self._stop.set)
            self._thread.join()

    def register(self, attempt: Attempt, *, sealed: bool = False) -> Live:
        """From now on calls may belong to `attempt`; its time starts to run."""
        return self.attempts.register(attempt, sealed=sealed)

    def unregister(self, live: Live) -> None:
        """The attempt is over: later calls are refused, calls in flight are cut."""
        self.attempts.unregister(live.id)
        if live.tasks:
            self._loop.call_soon_threadsafe(_cut, live)

    def spawn(self, work: Coroutine[Any, Any, None]) -> Future[None]:
        """Run `work` beside the server, where no agent can hold it up."""
        return asyncio.run_coroutine_threadsafe(work, self._loop)

    def _serve(self) -> None:
        with asyncio.Runner(loop_factory=lambda: self._loop) as runner:
            runner.run(self._main())

    async def _main(self) -> None:
        upstream = Upstream(self.router)
        app = web.Application(middlewares=[_openai_errors], client_max_size=LARGEST)
        handlers = _Handlers(self.attempts, self.router, upstream, self._store)
        for prefix in ("/v1", "/a/{attempt}/v1", "/a/{attempt}/{role}/v1"):
            app.router.add_post(f"{prefix}/{CHAT}", handlers.chat)
            app.router.add_post(f"{prefix}/{TEXT}", handlers.text)
            app.router.add_get(f"{prefix}/models", handlers.models)
        runner = web.AppRunner(
            app, access_log=None, handler_cancellation=True, shutdown_timeout=0.0
        )
        following = asyncio.create_task(self.router.follow())
        try:
            await runner.setup()
            site = web.TCPSite(runner, self._host, self._port, backlog=BACKLOG)
            try:
                await site.start()
            except OSError as error:
                self._listening.set_exception(error)
                return
            self._listening.set_result(runner.addresses[0][1])
            stopping = asyncio.create_task(self._stop.wait())
            await asyncio.wait((stopping, following), return_when=asyncio.FIRST_COMPLETED)
        finally:
            following.cancel()
            for live in self.attempts.live():
                _cut(live)
            await runner.cleanup()
            await upstream.close()
            with contextlib.suppress(asyncio.CancelledError):
                await following


class _Handlers:
    """The routes."""

    def __init__(
        self, attempts: Attempts, router: Router, upstream: Upstream, store: Store
    ) -> None:
        self._attempts, self._router, self._upstream = attempts, router, upstream
        self._store = store

    async def chat(self, request: web.Request) -> web.StreamResponse:
        return await self._call(request, CHAT)

    async def text(self, request: web.Request) -> web.StreamResponse:
        return await self._call(request, TEXT)

    async def models(self, _: web.Request) -> web.StreamResponse:
        names = sorted({*self._router.policies} | {p.model for p in self._router.policies.values()})
        listed = [
            {"id": name, "object": "model", "created": 0, "owned_by": "agentrl"} for name in names
        ]
        return json_response(200, {"object": "list", "data": listed})

    async def _call(self, request: web.Request, api: str) -> web.StreamResponse:
        caller = self._attempts.caller(request.headers, request.match_info)
        task = asyncio.current_task()
        assert task is not None
        caller.live.tasks.add(task)
        try:
            exchange = Exchange(self._upstream, self._store, caller, request, api)
            return await exchange.run()
        finally:
            caller.live.tasks.discard(task)


@web.middleware
async def _openai_errors(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Whatever goes wrong has the shape of an OpenAI error, and says whether to repeat."""
    try:
        return await handler(request)
    except RefusedError as refused:
        return _error(refused.status, refused.code, refused.message)
    except UpstreamError as error:
        if error.status is None:
            return _error(502, "model_unavailable", error.message)
        return web.Response(
            status=error.status,
            body=error.body,
            content_type="application/json",
            headers={"x-should-retry": "false"},  # we have, for as long as it made sense
        )
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        return _error(400, "invalid_json", f"the request body is not a JSON object: {error}")
    except web.HTTPRequestEntityTooLarge:
        return _error(413, "too_large", f"the request is larger than {LARGEST} bytes")
    except web.HTTPException as error:
        known = "POST /v1/chat/completions, POST /v1/completions, GET /v1/models"
        message = f"{request.method} {request.path}: {error.reason}; there is {known}"
        return _error(error.status, "unknown_url", message)


def _cut(live: Live) -> None:
    for task in live.tasks:
        task.cancel()


def _error(status: int, code: str, message: str) -> web.Response:
    kind = "invalid_request_error" if status < 500 else "server_error"
    error = {"message": message, "type": kind, "param": None, "code": code}
    return json_response(status, {"error": error}, {"x-should-retry": "false"})


def json_response(
    status: int, value: object, headers: dict[str, str] | None = None
) -> web.Response:
    return web.Response(
        status=status,
        body=msgspec.json.encode(value),
        content_type="application/json",
        headers=headers,
    )
