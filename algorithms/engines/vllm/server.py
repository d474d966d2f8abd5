"""The policy server for vLLM, in a child process or on servers that somebody else started.

Owns a folder with the files that servers read, and the method by which new weights reach them (see
`weight_sync`). Always true: weights change only while requests are held in front of vLLM, so one
version answers a whole call. With `in_flight` they change while vLLM is paused between two steps,
one server after another: running calls continue with keys of the new weights, and name the versions
of their tokens (see `spans`); a new version of an adapter is loaded beside the old one, which
running calls keep. After a failed publish requests stay held. A server that ends is restarted with
the newest published weights under the same URL; its calls in flight fail like a lost connection.
"""

from __future__ import annotations

import asyncio
import logging
import shutil
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import aclosing, asynccontextmanager, contextmanager
from pathlib import Path

from agentrl.algorithms.engines.vllm import weight_sync
from agentrl.algorithms.engines.vllm.client import VllmClient
from agentrl.algorithms.engines.vllm.parity_check import ParityCheck
from agentrl.algorithms.engines.vllm.serving import (
    CLOSE,
    HOLD,
    OPEN,
    RUNNING,
    LostError,
    ServedModel,
    TrainedModel,
    VllmHost,
)
from agentrl.algorithms.engines.vllm.sleep import KEYS, WEIGHTS, SleepCycle
from agentrl.algorithms.engines.vllm.spans import SPANS
from agentrl.algorithms.engines.vllm.weight_sync import AdapterSync, WeightSync
from agentrl.errors import PolicyError
from agentrl.types import POLICY

log = logging.getLogger(__name__)
RESTARTS = 3  # most restarts between two publishes
# vLLM documents clear_cache as without effect here, but it does make calls recompute their keys.
PAUSE, RESUME = "/pause?mode=keep&clear_cache=true", "/resume"
GRACE = 15.0  # seconds to wait after a failed request for the server to end


class VllmServer:
    """A PolicyServer whose weights are a copy of the learner's."""

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
        waiting for their end. sleep: see `sleep`."""
        self.model = POLICY
        self.in_flight = in_flight
        self.base_url = ""
        self.seconds: dict[str, float] = {}  # duration of each part of the newest publish
        self._learned, self._host, self._method = learned, host, method
        self._folder, self._timeout = folder, timeout
        self._serving = ServedModel(folder / "weights", folder / "tokenizer")
        self._parity = ParityCheck(learned, self._serving, tolerance)
        self._sync: WeightSync | None = None
        self._sleep = SleepCycle(sleep)
        self._failed_methods: dict[str, str] = {}  # method -> reason
        self._held = self._publish_failed = False
        self._swapping = False  # weights change while calls run
        self._changing = asyncio.Lock()  # held by an update, and while a server is adopted
        self._up, self._death = asyncio.Event(), asyncio.Event()
        self._failed: PolicyError | None = None
        self._given_up = asyncio.Event()
        self._restarts = 0
        self._tasks: list[asyncio.Task[None]] = []

    async def start(self) -> None:
        """Serve the learner's current weights as version 0. Raises PolicyError if vLLM does not
        start, or serves other weights."""
        try:
            await self._host.probe()
            while not await self._load_first():
                pass
            await self._parity.check_temperature(self.model, self._control)
            await self._open()
        except LostError:
            await self.close()
            raise PolicyError(
                f"vLLM failed at its first call; {self._host.failure_reason()}"
            ) from None
        except BaseException:
            await self.close()
            raise
        self.base_url = f"{self._host.url}/v1"
        self._up.set()
        self._tasks = [
            asyncio.create_task(self._restart_when_ended()),
            asyncio.create_task(self._adopt_returned()),
        ]

    async def _load_first(self) -> bool:
        """Start vLLM and send the learner's weights. False: the method failed, and method = "auto"
        allows another."""
        method = self._prepare()
        await self._host.start(self._serving)
        try:
            for policy in self._serving.versions:
                await self._load(policy)
        except (PolicyError, LostError) as error:
            assert self._sync is not None
            if self._method != "auto" or method == "reload" or len(self._serving.versions) > 1:
                raise
            self._sync.close()
            self._failed_methods[method] = f"it failed here ({error})"
            return False
        return True

    @asynccontextmanager
    async def updating(self) -> AsyncIterator[None]:
        async with self._changing_weights(in_flight=False):
            await self._retry_after_restart(lambda: self._sleep.sleep(self._control))
            yield

    @asynccontextmanager
    async def _changing_weights(self, *, in_flight: bool) -> AsyncIterator[None]:
        if self._held:  # inside `updating`
            yield
            return
        async with self._changing:
            if not in_flight:
                await self._retry_after_restart(self._hold)
            self._held, self._swapping = True, in_flight
            try:
                yield
            finally:
                self._held = self._swapping = False
                # After a failed publish, waiting calls would be answered with wrong weights.
                if not self._publish_failed:
                    await self._retry_after_restart(self._wake)
                    await self._retry_after_restart(self._open)

    async def _wake(self) -> None:
        """Wake vLLM if it still sleeps, as after an update without a publish."""
        policies = list(self._serving.versions) if self._sleep.dropped else []
        await self._sleep.wake(WEIGHTS, self._control)
        for policy in policies:
            await self._send(policy, self._control)
        await self._sleep.wake(KEYS, self._control)

    async def publish(self, version: int, policy: str | None = None) -> None:
        """As `PolicyServer.publish`. Raises PolicyError for a policy that is not served, and if
        vLLM's log-probs differ from the learner's afterwards: calls then wait until a publish
        succeeds."""
        policy = policy or self.model
        if policy not in self._serving.versions:
            served = ", ".join(map(repr, self._serving.versions))
            raise PolicyError(f"policy {policy!r} is not served; vLLM serves {served}")
        async with self._changing_weights(in_flight=self.in_flight):
            await self._drop_old()
            self._publish_failed = True
            with self._timed("take"):
                self._take(policy, version)
            await self._retry_after_restart(lambda: self._load(policy))
            self._publish_failed = False
            self._restarts = 0

    async def add(self, policy: str, version: int) -> None:
        """As `PolicyServer.add`. Also raises PolicyError if there is no room for an adapter."""
        self._check_adapters(policy)
        versions = self._serving.versions
        if policy not in versions and len(versions) >= self._host.room:
            raise PolicyError(
                f"vLLM has room for {self._host.room} adapters and serves {', '.join(versions)}; "
                "raise engine.vllm.max_adapters"
            )
        async with self._changing_weights(in_flight=self.in_flight):
            await self._drop_old()
            self._take(policy, version)
            await self._retry_after_restart(lambda: self._load(policy))

    async def remove(self, policy: str) -> None:
        self._check_adapters(policy)
        async with self._changing_weights(in_flight=self.in_flight):
            del self._serving.versions[policy]
            await self._drop_old()

    def _take(self, policy: str, version: int) -> None:
        """Make the learner's current weights the newest version, also for restarted servers."""
        assert self._sync is not None, "start() comes first"
        self._serving.versions[policy] = version
        self._sync.take(policy)

    async def _drop_old(self) -> None:
        """Unload old versions of adapters that no call uses."""
        if isinstance(sync := self._sync, AdapterSync):

            async def drop() -> None:
                await self._sleep.wake(WEIGHTS, self._control)  # adapters sleep with them
                (used,) = await self._control.post(RUNNING)
                await sync.drop(used, self._control)

            await self._retry_after_restart(drop)

    async def wait_for_failure(self) -> PolicyError:
        await self._given_up.wait()
        assert self._failed is not None
        return self._failed

    async def close(self) -> None:
        """Stop the child process; servers of a fleet keep running. May be called again."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._tasks = []
        await self._host.stop()
        if self._sync is not None:
            self._sync.close()
            self._sync = None
        shutil.rmtree(self._folder, ignore_errors=True)

    @property
    def _control(self) -> VllmClient:
        return VllmClient(self._host, self._timeout)

    def _check_adapters(self, policy: str) -> None:
        if not isinstance(self._sync, AdapterSync):
            raise PolicyError(
                f"vLLM cannot serve {policy!r} beside {self.model!r}, which is a whole model; "
                "train adapters (policy.lora.rank), or set engine.kind = 'embedded'"
            )

    def _prepare(self) -> str:
        """Choose how weights are sent, and write the files that a server starts with."""
        gpu, adapters = self._learned.gpu, self._learned.adapters
        capabilities = weight_sync.SyncCapabilities(
            adapters=self._host.refuses_adapters,
            backend=self._host.backend,
            gpu=gpu >= 0,
            shared=0 <= gpu < self._host.gpus,
            alone=self._host.gpus == 1,
            failed=self._failed_methods,
        )
        method, why = weight_sync.choose_sync(self._method, capabilities)
        if self.in_flight and method != "adapter" and not self._host.spans:
            log.warning(
                "A call that crosses an update names the version of its first token alone; start "
                "vLLM with --middleware agentrl.algorithms.engines.vllm.spans.SpanMiddleware."
            )
        if method != "adapter" and len(adapters) > 1:
            raise PolicyError(
                f"vLLM can serve one of the policies {', '.join(adapters)}, not all, because "
                f"{self._host.refuses_adapters}"
            )
        level = logging.WARNING if self._failed_methods else logging.INFO
        log.log(level, "vLLM gets new weights by %s (%s).", method, why)
        shutil.rmtree(self._folder, ignore_errors=True)  # of a run that was killed
        self._folder.mkdir(parents=True)
        self._serving.weights, self._serving.backend = self._folder / "weights", ""
        self._learned.save_tokenizer(self._serving.tokenizer)
        self._sync = weight_sync.make_sync(method, self._learned, self._folder, self._timeout)
        self._serving.adapters = method == "adapter"
        names = adapters if self._serving.adapters else [self._host.name]
        self.model = names[0]
        self._serving.versions = dict.fromkeys(names, 0)
        self._sync.prepare(self._serving)
        for policy in names:
            self._sync.take(policy)
        return method

    async def _hold(self) -> None:
        with self._timed("hold"):
            await self._control.post(HOLD)

    async def _open(self) -> None:
        await self._control.post(f"{OPEN}?{self._serving.query()}")

    async def _send(self, policy: str, servers: VllmClient) -> None:
        """Send the newest weights of a policy to running servers. Calls are held or paused there,
        or use another version of the adapter."""
        assert self._sync is not None
        with self._timed("send"):
            await self._sync.send(policy, servers)
        if self._swapping and self._serving.adapters:
            return
        with self._timed("reset"):
            # Keys of the old weights must not be reused.
            resets = await servers.post("/reset_prefix_cache")
        if not all(reset["success"] for reset in resets):
            raise PolicyError("vLLM did not clear its prefix cache after a weight update")
        if self._host.spans:
            await servers.post(f"{SPANS}?{self._serving.query()}")
        if self.in_flight and not self._serving.adapters:
            await servers.post(RESUME)

    async def _load(self, policy: str) -> None:
        """Send the newest weights and compare log-probs with the learner's. In flight, servers are
        paused one by one and calls go to the others; one that goes down gets them on return."""
        assert self._sync is not None
        pauses = self._swapping and not self._serving.adapters
        in_turn = tuple(self._host.servers) if pauses and self._sync.in_turn else ("",)
        for server in in_turn:
            servers = self._control.only(server)
            try:
                if pauses:
                    with self._timed("hold"):
                        await servers.post(CLOSE)
                        await servers.post(PAUSE)
                await self._sleep.wake(WEIGHTS, servers)
                await self._send(policy, servers)
                await self._sleep.wake(KEYS, servers)
                with self._timed("check"):
                    await self._parity.check_logprobs(policy, servers)
                if pauses:
                    await servers.post(f"{OPEN}?{self._serving.query()}")
            except LostError:
                left = self._host.servers
                if not server or server in left or not left:
                    raise

    @contextmanager
    def _timed(self, part: str) -> Iterator[None]:
        started = time.monotonic()
        yield
        self.seconds[part] = time.monotonic() - started

    async def _retry_after_restart(self, work: Callable[[], Awaitable[None]]) -> None:
        """Do `work` once the server is up, and again after a restart if it dies meanwhile."""
        self._sleep.may_start.set()
        while True:
            death = self._death
            await self._up.wait()  # a restart sets it within its time-out
            if self._failed is not None:
                raise self._failed
            try:
                return await work()
            except LostError as error:
                try:
                    async with asyncio.timeout(GRACE):
                        await death.wait()
                except TimeoutError:
                    raise PolicyError(f"vLLM: {error}; {self._host.failure_reason()}") from None

    async def _restart_when_ended(self) -> None:
        """Restart the server whenever it ends, until restarts fail too often."""
        while self._failed is None:
            await self._host.ended()
            self._up.clear()
            self._death.set()
            self._death = asyncio.Event()
            await self._sleep.may_start.wait()  # until then the learner uses its memory
            await self._restart()
            self._up.set()
        self._given_up.set()

    async def _restart(self) -> None:
        reason = self._host.failure_reason()
        log.warning("vLLM ended and is started again with the newest weights; %s", reason)
        while self._restarts < RESTARTS:
            self._restarts += 1
            try:
                await self._host.start(self._serving)
                self._sleep.restarted()
                for policy in list(self._serving.versions):
                    await self._send(policy, self._control)
                if not (self._held or self._publish_failed):
                    await self._open()
                return
            except (PolicyError, LostError, OSError) as error:
                reason = str(error)
        self._failed = PolicyError(f"vLLM ended {RESTARTS + 1} times in one step; {reason}")

    async def _adopt_returned(self) -> None:
        """Send the newest weights to servers that return while others stayed up."""
        async with aclosing(self._host.returned()) as returned:
            async for server in returned:
                async with self._changing:
                    try:
                        for policy in self._serving.versions:
                            await self._send(policy, self._control.only(server))
                    except (PolicyError, LostError) as error:
                        log.warning("%s is back and cannot be used: %s", server, error)
                        continue
                    await self._host.adopt(server)
                    if not self._publish_failed:
                        await self._control.only(server).post(f"{OPEN}?{self._serving.query()}")
                    log.info("%s is back, with the newest weights.", server)
