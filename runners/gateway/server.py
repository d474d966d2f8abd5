"""The model API for agents: an HTTP server in the worker's process.

Owns: a thread with its own event loop, which an agent that blocks the worker's loop does not block;
the listening socket; the connections to the policy servers.
Invariant: a call without an active attempt is refused; a call is durable before
the last byte of its response is sent; a response that was not stored is not delivered.
Writers: the worker registers attempts; the store is written only through `add_transitions` and
`add_spans`, and only for the caller's own attempt.
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import socket
import threading
from collections.abc import Collection, Coroutine, Iterator, Mapping, Sequence
from concurrent.futures import Future
from typing import Any

from aiohttp import web
from msgspec.structs import replace

from agentrl.base.access import ANYBODY, Access, is_loopback
from agentrl.base.http_server import listen, server_loop
from agentrl.base.processes import allow_files
from agentrl.config import UpstreamConfig
from agentrl.errors import ConfigError
from agentrl.runners.gateway.attribution import ActiveAttempt, AttemptRegistry
from agentrl.runners.gateway.endpoints import LARGEST_REQUEST, Endpoints
from agentrl.runners.gateway.features import Feature
from agentrl.runners.gateway.upstream import Router, Upstream
from agentrl.store.base import Store
from agentrl.types import Attempt

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
        """`upstreams` to `models`: see `Router`. `features`: in the order in which they see a call.
        `access`: the certificate and the keys, which a feature checks. `socket`: listens already,
        in place of `host` and `port`.
        If other machines can connect to `host`, only sealed attempts accept calls.

        Raises ConfigError if the API key of an upstream is missing."""
        self.base_url = ""  # for agents on this machine, known once started; ends in /v1
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
        here = "127.0.0.1" if self._host in ("", "0.0.0.0") else self._host
        here = "[::1]" if here == "::" else f"[{here}]" if ":" in here else here
        scheme = "https" if self._access.certfile else "http"
        self.base_url = f"{scheme}://{here}:{port}/v1"

    def close(self) -> None:
        """Refuse new calls, abort those in flight, end the thread."""
        if self._thread.is_alive():
            self._loop.call_soon_threadsafe(self._stop.set)
            self._thread.join()

    def register(self, attempt: Attempt, *, sealed: bool = False) -> ActiveAttempt:
        """Accept calls of `attempt` and start its timer. A sealed attempt accepts only calls with
        its `key`, the only secret that code outside this process may have."""
        return self.attempts.register(attempt, sealed=sealed)

    def unregister(self, active: ActiveAttempt) -> Future[None]:
        """Refuse later calls of an attempt and abort those in flight. The future is done when their
        partial responses are stored."""
        self.attempts.unregister(active.id)
        if self._loop.is_closed():  # no calls are in flight
            over: Future[None] = Future()
            over.set_result(None)
            return over
        return self.spawn(_abort_calls(active))  # by then earlier calls have entered `tasks`

    @contextlib.contextmanager
    def scoring(self, attempt: Attempt) -> Iterator[str]:
        """Let the verifier of `attempt` call frozen endpoints, such as a judge, in the trace whose
        id is yielded. It cannot call policies, and its calls are not recorded, as the policy must
        not be trained on a verifier's samples."""
        own = secrets.token_hex(16)  # a new id, which late calls of the agent do not have
        attempt = replace(attempt, id=own, prompts=[])
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
        upstream, app = Upstream(self.router), web.Application(client_max_size=LARGEST_REQUEST)
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
