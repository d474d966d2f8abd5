"""Admission of requests: between the HTTP handlers and the engine.

Owns the version of each policy and the requests in flight. Invariant: a request for an adapter
starts and ends under one version; so does one for a whole model, unless the engine swaps the
weights in between and then reports the version of each token. Everything here runs on the server's
event loop.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from itertools import count

import numpy as np

from agentrl.algorithms.engines.base import RequestHold
from agentrl.algorithms.engines.embedded.attention import GenerationRequest, TokenUpdate
from agentrl.algorithms.engines.embedded.engine import CLOSED, ENDED, Engine, TokenUpdates
from agentrl.algorithms.model.attention import context_length, longrope_threshold
from agentrl.algorithms.model.chat import Codec, RequestError, TextStream
from agentrl.algorithms.model.scaled import ReadPrompt
from agentrl.core.errors import PolicyError
from agentrl.core.types import Sampling


@dataclass(slots=True)
class PendingRequest:
    """`n` completions of one prompt, and a queue of their tokens."""

    version: int  # at admission
    calls: list[GenerationRequest] = field(default_factory=list)
    updates: asyncio.Queue[tuple[int, TokenUpdate]] = field(default_factory=asyncio.Queue)

    async def __aiter__(self) -> AsyncIterator[tuple[int, TokenUpdate]]:
        """Yield (index of the completion, new tokens) until all are finished.

        Raises RequestError if the engine fails one."""
        unfinished = len(self.calls)
        while unfinished:
            index, update = await self.updates.get()
            if update.finish == "error":
                ended = update.error == CLOSED or update.error.startswith(ENDED)
                raise RequestError(update.error, status=503 if ended else 500)
            unfinished -= update.finish is not None
            yield index, update


@dataclass(frozen=True, slots=True)
class StopConditions:
    """What ends a completion besides its maximal length: stop strings, stop tokens, EOS."""

    strings: tuple[str, ...] = ()
    tokens: tuple[int, ...] = ()
    ignore_eos: bool = False

    def check(self, codec: Codec) -> Callable[[int], bool] | None:
        """A function from each new token to whether it ends the completion; None if only length
        and EOS do."""
        if not (self.strings or self.tokens):
            return None
        stream = TextStream(codec, self.strings)

        def stopped(token: int) -> bool:
            stream.push((token,))
            return stream.stopped or token in self.tokens

        return stopped


NO_STOP_CONDITIONS = StopConditions()


class Admission:
    """The requests of one server, from admission to the last token."""

    def __init__(self, engine: Engine, codec: Codec, policies: Sequence[str]) -> None:
        """policies: names of the engine's policies, in the order of their numbers there."""
        self.engine, self._codec = engine, codec
        self.requests = RequestHold()
        self.requests.versions = dict.fromkeys(policies, 0)
        self._numbers = {name: number for number, name in enumerate(policies)}
        self._unused = count(len(policies))  # never reused, because cached keys belong to a number
        self._seeds = random.Random()  # the run's random state belongs to the algorithm
        self._updating = asyncio.Lock()
        self.pauses: list[float] = []  # seconds for which a publish kept the engine from computing

    async def hold(self) -> None:
        """Keep new calls waiting until `resume`; returns once no call is in flight."""
        await self._updating.acquire()
        try:
            await self.requests.hold()
        except asyncio.CancelledError:
            self.resume()
            raise

    def resume(self) -> None:
        self.requests.release()
        self._updating.release()

    @property
    def versions(self) -> dict[str, int]:
        return self.requests.versions

    @property
    def held(self) -> bool:
        return self._updating.locked()

    async def publish(
        self,
        version: int,
        policy: str,
        load: Callable[[], None] = lambda: None,
    ) -> None:
        """Serve the weights of `version` of a policy from now on. `load` copies them between two
        steps of the engine (see `Engine.swap`); without `load` they must be in place already, and
        no call in flight (see `hold`). Raises PolicyError for a policy that is not served."""
        if policy not in self._numbers:
            served = ", ".join(map(repr, self._numbers))
            raise PolicyError(f"policy {policy!r} is not served; served are {served}")
        swap = self.engine.swap(self._numbers[policy], version, load)
        self.pauses.append(await asyncio.wrap_future(swap))
        self.versions[policy] = version

    def adapter_of(self, policy: str) -> str | None:
        return self.engine.policies[self._numbers[policy]] if policy in self._numbers else None

    def add(self, policy: str, version: int, adapter: str) -> None:
        """Serve new requests for a policy with this adapter of the engine's model."""
        if policy in self._numbers:
            self.remove(policy)
        number = next(self._unused)
        self.engine.policies[number], self.engine.versions[number] = adapter, version
        self._numbers[policy], self.versions[policy] = number, version

    def remove(self, policy: str) -> None:
        """Reject new requests for a policy."""
        del self.versions[policy]
        self.engine.retire(self._numbers.pop(policy))

    @asynccontextmanager
    async def submit(
        self,
        prompt: Sequence[int],
        sampling: Sampling,
        policy: str,
        *,
        n: int = 1,
        ends: StopConditions = NO_STOP_CONDITIONS,
        stream: bool = False,
        top: int = 0,
    ) -> AsyncIterator[PendingRequest]:
        """Submit `n` completions of one prompt; leaving the context cancels unfinished ones.

        Raises RequestError for an invalid prompt, or one that leaves no room for a token."""
        self._check(prompt)
        await self.requests.wait_released()
        if policy not in self.versions:
            raise RequestError(f"policy {policy!r} is no longer served", status=404)
        pending = PendingRequest(self.versions[policy])
        with_images = prompt if isinstance(prompt, ReadPrompt) else None
        tokens = np.asarray(prompt if with_images is None else with_images.read, np.int32)
        seed = self._seeds.getrandbits(64) if sampling.seed is None else sampling.seed
        for index in range(n):
            call = GenerationRequest(
                prompt=tokens,
                sampling=sampling,
                seed=(seed + index) % 2**64,
                receive=self._receiver(pending, index),
                stream=stream,
                policy=self._numbers[policy],
                stop=ends.check(self._codec),
                ignore_eos=ends.ignore_eos,
                top=top,
                rotary=None if with_images is None else with_images.rotary,
            )
            pending.calls.append(call)
        self.requests.begin(n)
        unfinished = True
        for call in pending.calls:
            self.engine.submit(call)
        try:
            yield pending
            unfinished = False
        finally:
            if unfinished:
                for call in pending.calls:
                    self.engine.cancel(call)

    def _check(self, prompt: Sequence[int]) -> None:
        if not prompt:
            raise RequestError("the prompt has no tokens", param="prompt")
        size = len(self.engine.eos)
        if min(prompt) < 0 or max(prompt) >= size:
            token = next(token for token in prompt if not 0 <= token < size)
            raise RequestError(
                f"token {token} is not one of the model's {size} tokens", param="prompt"
            )
        if len(prompt) >= self.engine.max_context:
            raise self.too_long(f"{len(prompt)} tokens")

    def too_long(self, size: str) -> RequestError:
        """The error of a prompt of this size, which leaves no room to answer."""
        longest = self.engine.max_context
        model = self.engine.model
        is_limit = longest in (context_length(model), longrope_threshold(model))
        return RequestError(
            f"the model's context is {longest} tokens, and the prompt of {size} "
            "leaves no room to answer; shorten the messages or "
            + ("use a model with a longer context" if is_limit else "raise engine.max_context"),
            param="messages",
            code="context_length_exceeded",
        )

    def _receiver(self, pending: PendingRequest, index: int) -> Callable[[TokenUpdate], None]:
        def receive(update: TokenUpdate) -> None:
            pending.updates.put_nowait((index, update))
            if update.finish:
                self.requests.finish()

        return receive


def deliver(updates: TokenUpdates) -> None:
    """Pass the updates of an engine step to their requests."""
    for call, update in updates:
        call.receive(update)
