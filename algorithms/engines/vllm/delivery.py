"""Brings the newest weights to running vLLM servers, and opens them for calls."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

from agentrl.algorithms.engines.vllm.client import VllmClient
from agentrl.algorithms.engines.vllm.parity_check import ParityCheck
from agentrl.algorithms.engines.vllm.serving import (
    CLOSE,
    HOLD,
    OPEN,
    RUNNING,
    LostError,
    VllmHost,
)
from agentrl.algorithms.engines.vllm.sleep import KEYS, WEIGHTS, SleepCycle
from agentrl.algorithms.engines.vllm.spans import SPANS
from agentrl.algorithms.engines.vllm.weights import NewestWeights
from agentrl.errors import PolicyError

# vLLM documents clear_cache as without effect here, but it does make calls recompute their keys.
PAUSE, RESUME = "/pause?mode=keep&clear_cache=true", "/resume"


class Delivery:
    """The steps by which servers get weights; each may be repeated after a server has died.

    Invariant: a server is awake and has the newest weights of a policy, no keys of older ones that
    a new call could reuse, and the learner's log-probs, before `load` opens it or goes on to the
    next. Weights change only where calls are held, or, while `swapping`, where vLLM is paused
    between two steps or another version of the adapter is loaded. Writer: the `VllmServer`."""

    def __init__(
        self,
        host: VllmHost,
        weights: NewestWeights,
        parity: ParityCheck,
        sleep: SleepCycle,
        *,
        timeout: float,
        in_flight: bool,
    ) -> None:
        """timeout: seconds for calls in flight to end, and for vLLM to load an update. in_flight:
        see `VllmServer`."""
        self.in_flight = in_flight
        self.swapping = False  # weights change while calls run
        self.seconds: dict[str, float] = {}  # duration of each part of the newest publish
        self._host, self._weights, self.timeout = host, weights, timeout
        self.parity, self._sleep = parity, sleep

    @property
    def control(self) -> VllmClient:
        """A client of all servers that have the newest weights."""
        return VllmClient(self._host, self.timeout)

    async def hold(self) -> None:
        """Hold calls; returns once none is in flight."""
        with self.timed("hold"):
            await self.control.post(HOLD)

    async def open(self, server: str = "") -> None:
        """Let calls in, which are told the newest versions."""
        await self.control.only(server).post(f"{OPEN}?{self._weights.serving.query()}")

    async def sleep(self) -> None:
        await self._sleep.sleep(self.control)

    async def wake(self) -> None:
        """Wake vLLM if it still sleeps, as after an update without a publish."""
        policies = list(self._weights.serving.versions) if self._sleep.dropped else []
        await self._sleep.wake(WEIGHTS, self.control)
        for policy in policies:
            await self.send(policy, self.control)
        await self._sleep.wake(KEYS, self.control)

    async def send(self, policy: str, servers: VllmClient) -> None:
        """Send the newest weights of a policy, and forget keys of older ones."""
        with self.timed("send"):
            await self._weights.send(policy, servers)
        serving = self._weights.serving
        if self.swapping and serving.adapters:
            return
        with self.timed("reset"):
            resets = await servers.post("/reset_prefix_cache")
        if not all(reset["success"] for reset in resets):
            raise PolicyError("vLLM did not clear its prefix cache after a weight update")
        if self._host.spans:
            await servers.post(f"{SPANS}?{serving.query()}")
        if self.in_flight and not serving.adapters:
            await servers.post(RESUME)

    async def send_all(self, servers: VllmClient) -> None:
        """Send every policy to servers that have just started, or returned."""
        for policy in list(self._weights.serving.versions):
            await self.send(policy, servers)

    async def load(self, policy: str) -> None:
        """Send the newest weights and compare log-probs with the learner's. In flight, servers are
        paused one by one and calls go to the others; one that goes down gets them on return."""
        pauses = self.swapping and not self._weights.serving.adapters
        in_turn = tuple(self._host.servers) if pauses and self._weights.in_turn else ("",)
        for server in in_turn:
            try:
                await self._load(policy, server, pauses=pauses)
            except LostError:
                left = self._host.servers
                if not server or server in left or not left:
                    raise

    async def _load(self, policy: str, server: str, *, pauses: bool) -> None:
        servers = self.control.only(server)
        if pauses:
            with self.timed("hold"):
                await servers.post(CLOSE)
                await servers.post(PAUSE)
        await self._sleep.wake(WEIGHTS, servers)
        await self.send(policy, servers)
        await self._sleep.wake(KEYS, servers)
        with self.timed("check"):
            await self.parity.check_logprobs(policy, servers)
        if pauses:
            await self.open(server)

    async def check_temperature(self, policy: str) -> None:
        await self.parity.check_temperature(policy, self.control)

    async def drop_old(self) -> None:
        """Unload old versions of adapters that no call uses."""
        if adapters := self._weights.adapters:
            await self._sleep.wake(WEIGHTS, self.control)  # adapters sleep with them
            (used,) = await self.control.post(RUNNING)
            await adapters.drop(used, self.control)

    @contextmanager
    def timed(self, part: str) -> Iterator[None]:
        started = time.monotonic()
        yield
        self.seconds[part] = time.monotonic() - started
