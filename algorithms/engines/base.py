"""What a policy server is, and what all of them share. Requests are OpenAI's chat completions with
vLLM's additions:

request   `return_token_ids: true`, `logprobs: true`
response  `prompt_token_ids`, `choices[].token_ids`, `choices[].logprobs.content[].logprob`
          (streamed: the same fields in the chunks), header `x-policy-version`; where weights
          changed during a call, `choices[].agentrl_spans: [[0, 7], [12, 8]]`, each version with
          its first token (streamed: in the last chunk of the choice), else the field is absent
Log-probs are of the distribution at the request's temperature, before top-p and top-k (vLLM's are
after them); at temperature 0 they are those of the model itself.
"""

from __future__ import annotations

import asyncio
import os
import threading
from collections import Counter
from collections.abc import Callable, Coroutine, Iterator, Sequence
from contextlib import AbstractAsyncContextManager, contextmanager
from typing import Any, Protocol, TypeVar
from urllib.parse import parse_qsl, urlsplit

from agentrl.errors import PolicyError
from agentrl.http_server import server_loop

T = TypeVar("T")
VERSION_HEADER = "x-policy-version"  # of every answer


class PolicyServer(Protocol):
    """Serves policies by name. Every response names the version of the policy that sampled its
    first token."""

    base_url: str  # ends in /v1
    model: str  # the policy that requests without a name get
    # One with a true attribute `in_flight` needs no `updating` for `publish`, `add` and `remove`:
    # calls go on, and those of a whole model with the new weights from then on.

    async def start(self) -> None:
        """Listen. Raises PolicyError when the port is taken."""

    def updating(self) -> AbstractAsyncContextManager[None]:
        """Within this context weights may change: calls in flight have ended, new ones wait."""

    async def publish(self, version: int, policy: str | None = None) -> None:
        """Serve the current weights of a policy, default `model`, as `version`; the others keep
        their versions. Call inside `updating`."""

    async def add(self, policy: str, version: int) -> None:
        """Also serve an adapter of this name that the model has been given since. Call inside
        `updating`. Raises PolicyError where adapters are not served by name."""

    async def remove(self, policy: str) -> None:
        """Stop serving a policy; later requests for it are refused. Call inside `updating`."""

    async def wait_for_failure(self) -> PolicyError:
        """Returns the reason once the server has failed for good; until then it waits."""

    async def close(self) -> None: ...


class RequestHold:
    """The calls in flight of a policy server, and the hold that keeps new calls waiting.

    Weights change only while requests are held, as they are at first, until `release`. Always true:
    while they are held and `hold` has returned, no call is in flight, so every call is answered by
    one version of its policy. Used on one event loop."""

    def __init__(self) -> None:
        self.versions: dict[str, int] = {}  # by policy; the empty name: of every other name
        self.in_flight = 0
        self.running: Counter[str] = Counter()  # of those inside `call`, by its name
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
        """Returns while calls are admitted. `begin` must follow before anything else is awaited."""
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
        """One call is in flight while inside. Comes after `wait_released`."""
        self.begin()
        self.running[name] += 1
        try:
            yield
        finally:
            self.running[name] -= 1
            self.running = +self.running
            self.finish()


def parse_versions(query: str) -> dict[str, int]:
    """Versions by policy of a query such as `policy=3&other=0`."""
    return {policy: int(version) for policy, version in parse_qsl(query, keep_blank_values=True)}


class LoopThread:
    """An event loop in a thread of its own, so that a server answers while the learner computes.

    Runs from `start` until `stop`; its other methods may be awaited from any loop."""

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
        """What `work` returns, or raises, on the thread's loop."""
        assert self._loop is not None, "start() comes first"
        return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(work, self._loop))

    async def call(self, function: Callable[..., T], *arguments: Any) -> T:
        """What a plain function returns, or raises, on the thread's loop."""

        async def work() -> T:
            return function(*arguments)

        return await self.run(work())

    def post(self, function: Callable[..., object], *arguments: Any) -> None:
        """Have a plain function called on the thread's loop, without waiting for it."""
        assert self._loop is not None, "start() comes first"
        self._loop.call_soon_threadsafe(function, *arguments)

    async def stop(self) -> None:
        """End the loop, with whatever it still runs. A second time does nothing."""
        if self._loop is None or self._thread is None:
            return
        loop, thread = self._loop, self._thread
        self._loop = self._thread = None
        loop.call_soon_threadsafe(loop.stop)
        await asyncio.to_thread(thread.join)
        loop.close()


def advertised_url(base_url: str, host: str) -> str:
    """`base_url` with `host` in place of its host; unchanged where `host` is empty."""
    if not host:
        return base_url
    parts = urlsplit(base_url)
    name = f"[{host}]" if ":" in host else host
    return parts._replace(netloc=f"{name}:{parts.port}").geturl()


def port_taken(host: str, port: int, error: OSError) -> PolicyError:
    """The error of a policy server that cannot listen."""
    reason = os.strerror(error.errno) if error.errno else error
    return PolicyError(
        f"policy server: cannot listen on {host}:{port}: {reason}; set engine.port to a free port, "
        "or to 0 for any"
    )


async def run_unless_failed(work: Coroutine[Any, Any, T], servers: Sequence[PolicyServer]) -> T:
    """What `work` returns. If a server fails for good, `work` is cancelled and PolicyError raised:
    what waits for an answer of the policy would wait for ever."""
    doing = asyncio.ensure_future(work)
    watching = [asyncio.ensure_future(server.wait_for_failure()) for server in servers]
    try:
        await asyncio.wait([doing, *watching], return_when=asyncio.FIRST_COMPLETED)
        for watch in watching:
            if watch.done() and not doing.done():
                raise watch.result()
        return await doing
    finally:
        for task in (doing, *watching):
            task.cancel()
        await asyncio.gather(doing, *watching, return_exceptions=True)
