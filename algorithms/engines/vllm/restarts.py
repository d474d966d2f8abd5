"""Starts vLLM again whenever it ends, and repeats the work that its end interrupted."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable

from agentrl.algorithms.engines.vllm.serving import LostError, VllmHost
from agentrl.errors import PolicyError

log = logging.getLogger(__name__)
RESTARTS = 3  # most restarts between two publishes
GRACE = 15.0  # seconds to wait after a failed request for the server to end


class Restarts:
    """Whether vLLM is up.

    Invariant: after the first start `up` is set exactly while vLLM answers with the newest weights,
    or has been given up, and then `failed` says why: so what waits for `up` never waits for a
    server that nobody starts. Writer: the task of `watch`, which alone sets and clears it."""

    def __init__(
        self, host: VllmHost, start: Callable[[], Awaitable[None]], may_start: asyncio.Event
    ) -> None:
        """start: starts vLLM with the newest weights. may_start: set while it may take its memory;
        any work sets it."""
        self.up = asyncio.Event()
        self.failed: PolicyError | None = None
        self._host, self._start, self._may_start = host, start, may_start
        self._death, self._given_up = asyncio.Event(), asyncio.Event()
        self._since_publish = 0

    async def repeat(self, work: Callable[[], Awaitable[None]]) -> None:
        """Do `work` once the server is up, and again after a restart if it dies meanwhile."""
        self._may_start.set()
        while True:
            death = self._death
            await self.up.wait()  # a restart sets it within its time-out
            if self.failed is not None:
                raise self.failed
            try:
                return await work()
            except LostError as error:
                try:
                    async with asyncio.timeout(GRACE):
                        await death.wait()
                except TimeoutError:
                    raise PolicyError(f"vLLM: {error}; {self._host.failure_reason()}") from None

    def published(self) -> None:
        """Allow as many restarts again."""
        self._since_publish = 0

    async def wait_for_failure(self) -> PolicyError:
        await self._given_up.wait()
        assert self.failed is not None
        return self.failed

    async def watch(self) -> None:
        """Restart the server whenever it ends, until restarts fail too often."""
        while self.failed is None:
            await self._host.ended()
            self.up.clear()
            self._death.set()
            self._death = asyncio.Event()
            await self._may_start.wait()  # until then the learner uses its memory
            await self._restart()
            self.up.set()
        self._given_up.set()

    async def _restart(self) -> None:
        reason = self._host.failure_reason()
        log.warning("vLLM ended and is started again with the newest weights; %s", reason)
        while self._since_publish < RESTARTS:
            self._since_publish += 1
            try:
                await self._start()
                return
            except (PolicyError, LostError, OSError) as error:
                reason = str(error)
        self.failed = PolicyError(f"vLLM ended {RESTARTS + 1} times in one step; {reason}")
