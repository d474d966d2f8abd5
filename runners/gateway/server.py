"""The model as the agents see it: OpenAI's and Anthropic's APIs beside the worker.

Owns: a thread with its own event loop, so that an agent that blocks its loop blocks nothing here;
the listening socket; the connections to the policy servers.
Always true: a call that belongs to no active attempt is refused; the transition of a call is
durable before the last byte of its answer leaves; an answer that was not stored is not given.
Who may write: the worker registers attempts; the store is written only through `add_transitions`
and `add_spans`, and only for the caller's own attempt.
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import threading
from collections.abc import Collection, Coroutine, Iterator, Mapping, Sequence
from concurrent.futures import Future
from typing import Any

from aiohttp import web
from aiohttp.typedefs import Middleware
from msgspec.structs import replace

from agentrl.access import is_loopback
from agentrl.config import RoleRule, UpstreamConfig
from agentrl.errors import ConfigError
from agentrl.http_server import listen, server_loop
from agentrl.processes import allow_files
from agentrl.runners.gateway.attribution import ActiveAttempt, AttemptRegistry
from agentrl.runners.gateway.endpoints import LARGEST, Endpoints
from agentrl.runners.gateway.routing import Router
from agentrl.runners.gateway.upstream import Upstream
from agentrl.store.base import Store
from agentrl.types import Attempt

NAME = "x-agentrl-session"  # of an answer: the session, if its request belongs to one
NAMED = web.RequestKey(NAME, str)
STORE_TIMEOUT = 5.0  # seconds for calls that are cut to store what they had shown


class Gateway:
    """Start it, register attempts, and point agents at `base_url`."""

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
        rules: Sequence[RoleRule] = (),
        as_sent: bool = False,
        watch: Middleware | None = None,
    ) -> None:
        """From `upstreams` to `key` arguments of the `Router`. `rules` find the roles of calls
        that say none, `as_sent` is what `policy.messages` says, and `watch` sees every request.
        With a `host` that other machines can connect to, only sealed attempts can be reached.

        Raises ConfigError for an upstream without its API key."""
        self.base_url = ""  # for agents on this machine, known once started; ends in /v1
        self.port = port
        self.attempts = AttemptRegistry(open=is_loopback(host), roles=roles or (), rules=rules)
        self.router = Router(store, run, upstreams, roles, policies, remote=remote, key=key)
        self._store, self._host, self._as_sent = store, host, as_sent
        self._watch = (watch,) if watch is not None else ()
        self._loop = server_loop()
        self._thread = threading.Thread(target=self._serve, name="agentrl-gateway", daemon=True)
        self._listening: Future[int] = Future()
        self._stop = asyncio.Event()

    def start(self) -> None:
        """Returns when it listens. Raises ConfigError when the port is taken."""
        allow_files()  # a call in flight is two of them
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
        here = "127.0.0.1" if self._host in ("", "0.0.0.0") else self._host
        here = "[::1]" if here == "::" else f"[{here}]" if ":" in here else here
        self.base_url = f"http://{here}:{port}/v1"

    def close(self) -> None:
        """Refuse new calls, cut those in flight, end the thread."""
        if self._thread.is_alive():
            self._loop.call_soon_threadsafe(self._stop.set)
            self._thread.join()

    def register(self, attempt: Attempt, *, sealed: bool = False) -> ActiveAttempt:
        """From now on calls may belong to `attempt`; its time starts to run. A sealed one is
        reached only with its `key`: give no more than that to what runs outside this process."""
        return self.attempts.register(attempt, sealed=sealed)

    def unregister(self, active: ActiveAttempt) -> Future[None]:
        """The attempt is over: later calls are refused, calls in flight are cut. Done when the
        store has what those had shown to the agent."""
        self.attempts.unregister(active.id)
        if self._loop.is_closed():  # and its calls with it
            over: Future[None] = Future()
            over.set_result(None)
            return over
        return self.spawn(_abort_calls(active))  # a call that found it before is in `tasks` by then

    @contextlib.contextmanager
    def scoring(self, attempt: Attempt) -> Iterator[str]:
        """Inside the block the verifier of `attempt` can call frozen endpoints, such as a judge, in
        the trace whose id the block is given. It cannot call policies, and its calls are not
        recorded: what a verifier samples must not be learned from."""
        own = secrets.token_hex(16)  # late calls of the agent stay out
        attempt = replace(attempt, id=own, prompts=[])
        active = self.attempts.register(attempt, scoring=True)
        try:
            yield active.id
        finally:
            self.unregister(active)

    def spawn(self, work: Coroutine[Any, Any, None]) -> Future[None]:
        """Run `work` beside the server, where no agent can hold it up."""
        return asyncio.run_coroutine_threadsafe(work, self._loop)

    def _serve(self) -> None:
        with asyncio.Runner(loop_factory=lambda: self._loop) as runner:
            runner.run(self._main())

    async def _main(self) -> None:
        upstream = Upstream(self.router, as_sent=self._as_sent)
        app = web.Application(client_max_size=LARGEST, middlewares=self._watch)
        if self._watch:
            app.on_response_prepare.append(_name_session)
        Endpoints(self.attempts, self.router, upstream, self._store).add_to(app)
        following, runner = asyncio.create_task(self.router.follow()), None
        try:
            try:
                runner, _ = await listen(app, self._host, self.port, shutdown=0.0)
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


async def _name_session(request: web.Request, response: web.StreamResponse) -> None:
    if name := request.get(NAMED):
        response.headers[NAME] = name


async def _abort_calls(active: ActiveAttempt) -> None:
    for task in active.tasks:
        task.cancel()
    if active.tasks:
        await asyncio.wait(active.tasks, timeout=STORE_TIMEOUT)
