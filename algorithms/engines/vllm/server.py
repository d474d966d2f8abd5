"""The policy server for vLLM, in a child process or on servers that somebody else started.

A publish takes the learner's weights (`weights`), brings them to the servers (`delivery`), and does
so again if vLLM dies meanwhile. With `in_flight` weights change while vLLM is paused
between two steps, one server after another: running calls continue with keys of the new weights,
and name the versions of their tokens (see `spans`); a new version of an adapter is loaded beside
the old one, which running calls keep. A server that ends is restarted with the newest published
weights under the same URL; its calls in flight fail like a lost connection.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import aclosing, asynccontextmanager
from pathlib import Path

from agentrl.algorithms.engines.vllm.delivery import ParityCheck, SleepCycle, WeightDelivery
from agentrl.algorithms.engines.vllm.serving import LostError, TrainedModel, VllmHost
from agentrl.algorithms.engines.vllm.weights import NewestWeights
from agentrl.errors import PolicyError
from agentrl.types import POLICY

log = logging.getLogger(__name__)
MOST_RESTARTS = 3  # most restarts between two publishes
CRASH_GRACE = 15.0  # seconds to wait after a failed request for the server to end


class VllmServer:
    """A PolicyServer whose weights are a copy of the learner's.

    Invariant: weights change only by the holder of `_changing`, one change at a time. Outside of a
    change calls are let in, and each is answered by the version that it names; after a failed
    publish they wait, because they would be answered with wrong weights, until one succeeds."""

    def __init__(
        self,
        learned: TrainedModel,
        host: VllmHost,
        *,
        folder: Path,
        method: str = "auto",
        timeout: float = 60.0,
        tolerance: float = 1e-3,
        in_flight: bool = False,
        sleep: int = 0,
    ) -> None:
        """folder: for the files that servers read, used by this server alone; a fleet must find it
        under the same path. method: see `weight_sync`. timeout: seconds for calls in flight to end
        before an update, and for vLLM to load the update. tolerance: largest difference in
        log-probs after a publish. in_flight: a publish outside `updating` pauses calls instead of
        waiting for their end. sleep: see `SleepCycle`."""
        self.model, self.base_url = POLICY, ""
        self.host = host
        self._weights = NewestWeights(learned, host, folder, method, timeout)
        self._sleep = SleepCycle(sleep)
        parity = ParityCheck(learned, self._weights.serving, tolerance)
        self.delivery = WeightDelivery(
            host, self._weights, parity, self._sleep, timeout=timeout, in_flight=in_flight
        )
        self.restarts = Restarts(host, self._start_again, self._sleep.may_start)
        self._changing = asyncio.Lock()  # held by an update, and while a server is adopted
        self._held = self._publish_failed = False
        self._tasks: list[asyncio.Task[None]] = []

    @property
    def in_flight(self) -> bool:
        return self.delivery.in_flight

    async def start(self) -> None:
        """Serve the learner's current weights as version 0. Raises PolicyError if vLLM does not
        start, or serves other weights."""
        try:
            await self.host.probe()
            while not await self._load_first():
                pass
            await self.delivery.check_temperature(self.model)
            await self.delivery.open()
        except LostError:
            await self.close()
            raise PolicyError(
                f"vLLM failed at its first call; {self.host.failure_reason()}"
            ) from None
        except BaseException:
            await self.close()
            raise
        self.base_url = f"{self.host.url}/v1"
        self.restarts.up.set()
        self._tasks = [
            asyncio.create_task(self.restarts.watch()),
            asyncio.create_task(self._adopt_returned()),
        ]

    async def _load_first(self) -> bool:
        """Start vLLM and send the learner's weights. False: the method failed, and method = "auto"
        allows another."""
        self.model = self._weights.prepare(in_flight=self.in_flight)
        await self.host.start(self._weights.serving)
        try:
            for policy in self._weights.serving.versions:
                await self.delivery.load(policy)
        except (PolicyError, LostError) as error:
            if not self._weights.allows_another(error):
                raise
            return False
        return True

    @asynccontextmanager
    async def updating(self) -> AsyncIterator[None]:
        async with self._changing_weights(in_flight=False):
            await self.restarts.repeat(self.delivery.sleep)
            yield

    @asynccontextmanager
    async def _changing_weights(self, *, in_flight: bool) -> AsyncIterator[None]:
        if self._held:  # inside `updating`
            yield
            return
        async with self._changing:
            if not in_flight:
                await self.restarts.repeat(self.delivery.hold)
            self._held, self.delivery.swapping = True, in_flight
            try:
                yield
            finally:
                self._held = self.delivery.swapping = False
                if not self._publish_failed:
                    await self.restarts.repeat(self.delivery.wake)
                    await self.restarts.repeat(self.delivery.open)

    async def publish(self, version: int, policy: str | None = None) -> None:
        """As `PolicyServer.publish`. Raises PolicyError for a policy that is not served, and if
        vLLM's log-probs differ from the learner's afterwards: calls then wait until a publish
        succeeds."""
        policy = policy or self.model
        if policy not in self._versions:
            served = ", ".join(map(repr, self._versions))
            raise PolicyError(f"policy {policy!r} is not served; vLLM serves {served}")
        async with self._changing_weights(in_flight=self.in_flight):
            await self._drop_old()
            self._publish_failed = True
            with self.delivery.timed("take"):
                self._weights.take(policy, version)
            await self.restarts.repeat(lambda: self.delivery.load(policy))
            self._publish_failed = False
            self.restarts.published()

    async def add(self, policy: str, version: int) -> None:
        """As `PolicyServer.add`. Also raises PolicyError if there is no room for an adapter."""
        self._check_adapters(policy)
        if policy not in self._versions and len(self._versions) >= self.host.max_adapters:
            raise PolicyError(
                f"vLLM has room for {self.host.max_adapters} adapters and serves"
                f" {', '.join(self._versions)}; raise engine.vllm.max_adapters"
            )
        async with self._changing_weights(in_flight=self.in_flight):
            await self._drop_old()
            self._weights.take(policy, version)
            await self.restarts.repeat(lambda: self.delivery.load(policy))

    async def remove(self, policy: str) -> None:
        self._check_adapters(policy)
        async with self._changing_weights(in_flight=self.in_flight):
            del self._versions[policy]
            await self._drop_old()

    async def wait_for_failure(self) -> PolicyError:
        return await self.restarts.wait_for_failure()

    async def close(self) -> None:
        """Stop the child process; servers of a fleet keep running. May be called again."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._tasks = []
        await self.host.stop()
        self._weights.close()

    @property
    def _versions(self) -> dict[str, int]:
        """The newest version of each policy."""
        return self._weights.serving.versions

    async def _drop_old(self) -> None:
        if self._weights.adapters:
            await self.restarts.repeat(self.delivery.drop_old)

    def _check_adapters(self, policy: str) -> None:
        if not self._weights.adapters:
            raise PolicyError(
                f"vLLM cannot serve {policy!r} beside {self.model!r}, which is a whole model; "
                "train adapters (policy.lora.rank), or set engine.kind = 'embedded'"
            )

    async def _start_again(self) -> None:
        """Start vLLM with the newest weights, and let calls in unless these change."""
        await self.host.start(self._weights.serving)
        self._sleep.restarted()
        await self.delivery.send_all(self.delivery.control)
        if not (self._held or self._publish_failed):
            await self.delivery.open()

    async def _adopt_returned(self) -> None:
        """Send the newest weights to servers that return while others stayed up."""
        async with aclosing(self.host.returned()) as returned:
            async for server in returned:
                async with self._changing:
                    try:
                        await self.delivery.send_all(self.delivery.control.only(server))
                    except (PolicyError, LostError) as error:
                        log.warning("%s is back and cannot be used: %s", server, error)
                        continue
                    await self.host.adopt(server)
                    if not self._publish_failed:
                        await self.delivery.open(server)
                    log.info("%s is back, with the newest weights.", server)


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
                    async with asyncio.timeout(CRASH_GRACE):
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
        while self._since_publish < MOST_RESTARTS:
            self._since_publish += 1
            try:
                await self._start()
                return
            except (PolicyError, LostError, OSError) as error:
                reason = str(error)
        self.failed = PolicyError(f"vLLM ended {MOST_RESTARTS + 1} times in one step; {reason}")
