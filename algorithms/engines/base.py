"""The `PolicyServer` protocol, and the code that all policy servers share.

Requests are OpenAI's chat completions with vLLM's additions:

request   `return_token_ids: true`, `logprobs: true`
response  `prompt_token_ids`, `choices[].token_ids`, `choices[].logprobs.content[].logprob`
          (streamed: the same fields in the chunks), header `x-policy-version`; if weights changed
          during a call, `choices[].agentrl_spans: [[0, 7], [12, 8]]`, pairs of first token and
          version (streamed: in the last chunk of the choice); header `x-processors: none` if no
          option of the request changed the distribution
Log-probs are those of the distribution at the request's temperature, before top-p and top-k (vLLM:
after them), and at temperature 0 those at temperature 1.
"""

from __future__ import annotations

import asyncio
import os
import threading
from collections import Counter
from collections.abc import Callable, Coroutine, Iterator, Sequence
from contextlib import AbstractAsyncContextManager, contextmanager
from typing import Any, Protocol, TypeVar
from urllib.parse import urlsplit

from agentrl.core.errors import PolicyError
from agentrl.core.http import server_loop

T = TypeVar("T")
VERSION_HEADER = "x-policy-version"  # in every response


class PolicyServer(Protocol):
    """Serves policies by name. Every response names the version of the policy that sampled its
    first token."""

    base_url: str  # ends in /v1
    model: str  # the policy that answers requests without a model name
    # If the server has a true attribute `in_flight`, `publish`, `add` and `remove` may be called
    # outside of `updating`: running calls continue; calls of a whole model continue with the new
    # weights.

    async def start(self) -> None:
        """Listen. Raises PolicyError when the port is taken."""

    def updating(self) -> AbstractAsyncContextManager[None]:
        """Context in which weights may change: no call is in flight, new calls wait."""

    async def publish(self, version: int, policy: str | None = None) -> None:
        """Serve the current weights of a policy, default `model`, as `version`; other policies keep
        their versions. Call inside `updating`."""

    async def add(self, policy: str, version: int) -> None:
        """Also serve an adapter of this name that was added to the model. Call inside `updating`.
        Raises PolicyError if adapters are not served by name."""

    async def remove(self, policy: str) -> None:
        """Stop serving a policy: later requests for it fail. Call inside `updating`."""

    async def wait_for_failure(self) -> PolicyError:
        """Wait until the server has failed for good; returns the reason."""

    async def close(self) -> None: ...


class RequestHold:
    """Counts the calls in flight of a policy server, and holds new calls while weights change.

    New calls are held at first, until `release`. Invariant: from the return of `hold` to
    `release` no call is in flight, so one version of a policy answers a whole call. Used on one
    event loop."""

    def __init__(self) -> None:
        # By policy; the empty name is the default for all other names.
        self.versions: dict[str, int] = {}
        self.in_flight = 0
        self.running: Counter[str] = Counter()  # calls inside `call`, by its `name`
        self._released, self._drained = asyncio.Event(), asyncio.Event()
        self._drained.set()

    def close(self) -> None:
        """Admit no more calls."""
        self._released.clear()

    async def hold(self) -> None:
        """Admit no more calls; returns once none is in flight."""
        self.close()
        await self._drained.wait()

    def release(self) -> None:
        """Admit calls again."""
        self._released.set()

    async def wait_released(self) -> None:
        """Wait until calls are admitted. The caller must `begin` before it awaits anything else."""
        while not self._released.is_set():  # held again before this task woke up
            await self._released.wait()

    def begin(self, calls: int = 1) -> None:
        self.in_flight += calls
        self._drained.clear()

    def finish(self) -> None:
        """One call has ended."""
        self.in_flight -= 1
        if not self.in_flight:
            self._drained.set()

    @contextmanager
    def call(self, name: str = "") -> Iterator[None]:
        """Context of one call in flight. Enter it after `wait_released`."""
        self.begin()
        self.running[name] += 1
        try:
            yield
        finally:
            self.running[name] -= 1
            self.running = +self.running
            self.finish()


class LoopThread:
    """An event loop in a separate thread, so that a server answers while the learner computes.

    Runs from `start` until `stop`; the other methods may be awaited from any loop."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        self._loop = server_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name=self._name, daemon=True)
        self._thread.start()

    @property
    def running(self) -> bool:
        return self._thread is not None

    async def run(self, work: Coroutine[Any, Any, T]) -> T:
        """Run a coroutine on the thread's loop; returns its result or raises its error."""
        assert self._loop is not None, "start() comes first"
        return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(work, self._loop))

    async def call(self, function: Callable[..., T], *arguments: Any) -> T:
        """Call a plain function on the thread's loop; returns its result or raises its error."""

        async def work() -> T:
            return function(*arguments)

        return await self.run(work())

    def post(self, function: Callable[..., object], *arguments: Any) -> None:
        """Schedule a plain function on the thread's loop, without waiting for it."""
        assert self._loop is not None, "start() comes first"
        self._loop.call_soon_threadsafe(function, *arguments)

    async def stop(self) -> None:
        """Stop the loop and cancel its tasks. May be called again."""
        if self._loop is None or self._thread is None:
            return
        loop, thread = self._loop, self._thread
        self._loop = self._thread = None
        loop.call_soon_threadsafe(loop.stop)
        await asyncio.to_thread(thread.join)
        loop.close()


def advertised_url(base_url: str, host: str) -> str:
    """Replace the host of `base_url`, unless `host` is empty."""
    if not host:
        return base_url
    parts = urlsplit(base_url)
    name = f"[{host}]" if ":" in host else host
    return parts._replace(netloc=f"{name}:{parts.port}").geturl()


def port_taken(host: str, port: int, error: OSError) -> PolicyError:
    """The error for a policy server that cannot listen."""
    reason = os.strerror(error.errno) if error.errno else error
    return PolicyError(
        f"policy server: cannot listen on {host}:{port}: {reason}; set engine.port to a free port, "
        "or to 0 for any"
    )


async def run_unless_failed(work: Coroutine[Any, Any, T], servers: Sequence[PolicyServer]) -> T:
    """Run `work` and return its result. If a server fails for good, cancels `work`, which might
    wait for its answer forever, and raises PolicyError."""
    task = asyncio.ensure_future(work)
    failures = [asyncio.ensure_future(server.wait_for_failure()) for server in servers]
    try:
        await asyncio.wait([task, *failures], return_when=asyncio.FIRST_COMPLETED)
        for failure in failures:
            if failure.done() and not task.done():
                raise failure.result()
        return await task
    finally:
        for future in (task, *failures):
            future.cancel()
        await asyncio.gather(task, *failures, return_exceptions=True)
