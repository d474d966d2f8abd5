"""The embedded policy server: serves the model that the learner in this process trains.

Owns one thread with an event loop for HTTP, and the engine's thread; with `keys` also a copy of the
trained weights. Always true: every response names the version or versions that sampled it. Without
a copy, weights change only inside `updating`, while no call is in flight. With one, the learner may
write its own weights at any time, and `publish` updates the copy while calls run: a whole model
between two decoding steps; of an adapter it loads a second one, which new calls use.
"""

from __future__ import annotations

import asyncio
import copy
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from itertools import count
from typing import Literal

from aiohttp import web

from agentrl.algorithms.engines.base import LoopThread, port_taken
from agentrl.algorithms.engines.embedded.admission import Admission, deliver
from agentrl.algorithms.engines.embedded.engine import ENDED, Engine, sentence_of
from agentrl.algorithms.engines.embedded.proof import served_context, supported_way
from agentrl.algorithms.engines.embedded.routes import Routes
from agentrl.algorithms.model.adapters import Adapters
from agentrl.algorithms.model.chat import Chat
from agentrl.algorithms.model.cpu_threads import sampling_threads
from agentrl.algorithms.model.inputs import inputs_of
from agentrl.algorithms.model.load import Model, Tokenizer, end_tokens
from agentrl.algorithms.model.text import Codec
from agentrl.base.access import ANYBODY, Access
from agentrl.base.http_server import ask_for_key, listen
from agentrl.errors import PolicyError
from agentrl.types import POLICY, Sampling

NO_DEFAULTS = Sampling()


class EmbeddedServer:
    """A PolicyServer on a model object and its adapters. Its methods may be awaited from any event
    loop."""

    def __init__(
        self,
        model: Model,
        tokenizer: Tokenizer,
        *,
        host: str = "127.0.0.1",
        port: int = 0,
        name: str = POLICY,
        adapters: Adapters | None = None,
        max_batch: int = 64,
        max_context: int = 2048,
        threads: int = 0,
        defaults: Sampling = NO_DEFAULTS,
        keys: Literal["recompute", "keep"] | None = None,
        access: Access = ANYBODY,
    ) -> None:
        """port: 0: any free one. max_context: most tokens of prompt and completion, capped by the
        model's positions. threads: 0: see `engine.threads`. defaults: sampling of requests that
        do not set it. keys: whether running calls recompute or keep their cached keys when weights
        change; None: weights do not change while calls run. Recomputed keys give every token the
        log-prob of the version it names; kept ones give that of a mixture, from which it was
        sampled. access: who may call.

        Serves every adapter that exists now under its name, and the model without adapters as
        `name`, if no adapter has that name. Requests without a model name get `name`.

        Logs how the model is computed; raises PolicyError for one that cannot be served."""
        self.model = name
        self.base_url = ""
        self.in_flight, self._keep = keys is not None, keys == "keep"
        self._learned = self._copy = model, adapters
        if self.in_flight:
            adapters = adapters and adapters.copy()
            model = adapters.model if adapters else copy.deepcopy(model)
            self._copy = model, adapters
        self._numbers = count()
        self._opened: set[str] = set()  # adapters of the copy that `add` has loaded
        # Loads and unloads adapters while the engine's thread applies others.
        self._opener = ThreadPoolExecutor(1, "adapters")
        self._host, self._port, self._access = host, port, access
        self._http = LoopThread("policy-http")
        policies: dict[str, str | None] = {name: None}
        policies |= {each: each for each in (adapters.names if adapters else ())}
        engine = Engine(
            model,
            eos=end_tokens(model, tokenizer),
            max_batch=max_batch,
            max_context=served_context(model, max_context),
            threads=threads or sampling_threads(sum(p.numel() for p in model.parameters())),
            deliver=lambda updates: self._http.post(deliver, updates),
            adapters=adapters,
            policies=list(policies.values()),
            dropped=self._close_adapter,
            way=supported_way(model),
        )
        codec = Codec(tokenizer, engine.max_context)
        self._admission = Admission(engine, codec, list(policies))
        inputs = inputs_of(model)
        self._chat = inputs.chat(tokenizer, codec) if inputs else Chat(tokenizer, codec)
        self._routes = Routes(self._admission, self._chat, codec, name, defaults)
        self._runner: web.AppRunner | None = None

    async def start(self) -> None:
        self._http.start()
        try:
            await self._http.run(self._listen())
        except OSError as error:
            await self.close()
            raise port_taken(self._host, self._port, error) from None

    @asynccontextmanager
    async def updating(self) -> AsyncIterator[None]:
        await self._http.run(self._admission.hold())
        try:
            yield
        finally:
            await self._http.call(self._admission.resume)

    async def publish(self, version: int, policy: str | None = None) -> None:
        """As `PolicyServer.publish`; outside `updating` it first waits for the calls in flight."""
        policy = policy or self.model
        if self.in_flight and self._admission.adapter_of(policy) is not None:
            await self.add(policy, version)
        elif self.in_flight:
            swap = self._admission.publish(version, policy, self._load, keep=self._keep)
            await self._http.run(swap)
        elif self._admission.held:
            await self._http.run(self._admission.publish(version, policy))
        else:
            async with self.updating():
                await self._http.run(self._admission.publish(version, policy))

    async def wait_for_failure(self) -> PolicyError:
        blind, failure = self._chat.blind, self._admission.engine.failure
        both = [asyncio.wrap_future(one) for one in (blind, failure)]
        # Both may be set even if this is cancelled.
        await asyncio.wait(both, return_when=asyncio.FIRST_COMPLETED)
        if blind.done():
            return PolicyError(
                f"{blind.result()}. Then start over: the same command with --fresh, if it has this"
                " option; in Python fit(fresh=True)"
            )
        error = failure.result()
        return PolicyError(ENDED + sentence_of(error))

    async def add(self, policy: str, version: int) -> None:
        adapter = policy
        if self.in_flight:
            opened = self._opener.submit(self._open_adapter, policy)
            adapter = await asyncio.wrap_future(opened)
        await self._http.call(self._admission.add, policy, version, adapter)

    async def remove(self, policy: str) -> None:
        await self._http.call(self._admission.remove, policy)

    async def close(self) -> None:
        """Fail the calls in flight and stop. May be called again."""
        if self._http.running:
            await self._http.run(self._shut())
            await self._http.stop()
        self._opener.shutdown()

    @property
    def pauses(self) -> list[float]:
        """Seconds that each publish kept the engine from computing."""
        return self._admission.pauses

    def _load(self) -> None:
        (own, _), (learned, _) = self._copy, self._learned
        for target, source in zip(own.parameters(), learned.parameters(), strict=True):
            target.copy_(source)

    def _open_adapter(self, policy: str) -> str:
        (_, own), (_, learned) = self._copy, self._learned
        assert own is not None
        assert learned is not None
        name = f"{policy}#{next(self._numbers)}"
        own.duplicate(name, learned, policy)
        self._opened.add(name)
        return name

    def _close_adapter(self, adapter: str | None) -> None:
        """Unload an adapter of the copy that no request uses any more."""
        (_, own), opened = self._copy, self._opened
        if own is not None and adapter in opened:
            opened.remove(adapter)
            self._opener.submit(own.close, adapter)

    async def _listen(self) -> None:
        self._runner, url = await listen(
            self._routes.app(ask_for_key(self._access)),
            self._host,
            self._port,
            access=self._access,
        )
        self._admission.requests.release()
        self._admission.engine.start()
        self.base_url = f"{url}/v1"

    async def _shut(self) -> None:
        if self._admission.engine.alive:
            await asyncio.to_thread(self._admission.engine.close)
        if self._runner is not None:
            await self._runner.cleanup()
        self._routes.close()
        await asyncio.get_running_loop().shutdown_default_executor()
