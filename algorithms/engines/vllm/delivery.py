"""Delivery of the newest weights to running vLLM servers: wakes them, sends, compares, admits
calls.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from math import inf, isnan
from typing import Any

from agentrl.algorithms.engines.vllm.fleet import VllmClient
from agentrl.algorithms.engines.vllm.protocol import (
    CLOSE,
    HOLD,
    OPEN,
    RUNNING,
    SPANS,
    LostError,
    ServedModel,
    TrainedModel,
    VllmHost,
)
from agentrl.algorithms.engines.vllm.weights import NewestWeights
from agentrl.core.errors import PolicyError
from agentrl.core.types import POLICY, Json

# vLLM documents clear_cache as without effect here, but calls do recompute their KV cache.
PAUSE_ROUTE, RESUME_ROUTE = "/pause?mode=keep&clear_cache=true", "/resume"
WEIGHTS, KEYS = "weights", "kv_cache"  # vLLM's tags of wake_up
COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"


class WeightDelivery:
    """The steps that transfer weights to servers; each may be repeated after a server has died.

    Invariant: before `load` opens a server or continues with the next, the server is awake, has the
    newest weights of a policy and no reusable KV cache of older weights, and its log-probs match
    the learner's. Weights change only while calls are held, or, while `swapping`, while vLLM is
    paused between two steps or another version of the adapter is loaded. Writer: the
    `VllmServer`."""

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
        """Admit calls; they are answered by the newest versions."""
        await self.control.only(server).post(f"{OPEN}?{self._weights.serving.query()}")

    async def sleep(self) -> None:
        await self._sleep.sleep(self.control)

    async def wake(self) -> None:
        """Wake vLLM if it still sleeps, for example after an update without a publish."""
        policies = list(self._weights.serving.versions) if self._sleep.dropped else []
        await self._sleep.wake(WEIGHTS, self.control)
        for policy in policies:
            await self.send(policy, self.control)
        await self._sleep.wake(KEYS, self.control)

    async def send(self, policy: str, servers: VllmClient) -> None:
        """Send the newest weights of a policy, and drop the KV cache of older weights."""
        with self.timed("send"):
            await self._weights.send(policy, servers)
        serving = self._weights.serving
        if self.swapping and serving.adapters:
            return
        with self.timed("reset"):
            resets = await servers.post("/reset_prefix_cache")
        if not all(reset["success"] for reset in resets):
            raise PolicyError("vLLM did not clear its prefix cache after a weight update")
        if self.parity.learned.inputs is not None:
            await servers.post("/reset_encoder_cache")
        if self._host.spans:
            await servers.post(f"{SPANS}?{serving.query()}")
        if self.in_flight and not serving.adapters:
            await servers.post(RESUME_ROUTE)

    async def send_all(self, servers: VllmClient) -> None:
        """Send every policy to servers that have just started, or returned."""
        for policy in list(self._weights.serving.versions):
            await self.send(policy, servers)

    async def load(self, policy: str) -> None:
        """Send the newest weights and compare log-probs with the learner's. With calls in flight,
        servers are paused one by one and calls go to the others; a server that goes down gets the
        weights when it returns."""
        pauses = self.swapping and not self._weights.serving.adapters
        in_turn = tuple(self._host.servers) if pauses and self._weights.in_turn else ("",)
        for server in in_turn:
            try:
                await self._load(policy, server, pauses=pauses)
            except LostError:
                remaining = self._host.servers
                if not server or server in remaining or not remaining:
                    raise

    async def _load(self, policy: str, server: str, *, pauses: bool) -> None:
        servers = self.control.only(server)
        if pauses:
            with self.timed("hold"):
                await servers.post(CLOSE)
                await servers.post(PAUSE_ROUTE)
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


class SleepCycle:
    """vLLM's sleep mode: a child on the learner's GPU frees its memory during updates.

    Level 1 keeps the weights in host memory; level 2 drops them, and they are sent again. Both drop
    the KV cache. Invariant: a child sleeps only while calls are held; it wakes the weights before
    the KV cache, because the GPU may not hold both plus the buffers of a weight transfer."""

    def __init__(self, level: int) -> None:
        """level: vLLM's sleep level; 0: it never sleeps."""
        self.level = level
        self._asleep: set[str] = set()
        # Set while vLLM may use GPU memory: the restart of a server that died asleep waits for it.
        self.may_start = asyncio.Event()
        self.may_start.set()

    async def sleep(self, servers: VllmClient) -> None:
        """Put vLLM to sleep. Calls must be held."""
        if self.level:
            # mode=abort ends requests of other clients, because their KV cache is lost.
            await servers.post(f"/sleep?level={self.level}&mode=abort")
            self._asleep = {WEIGHTS, KEYS}
            self.may_start.clear()

    async def wake(self, tag: str, servers: VllmClient) -> None:
        """Wake a part, if it is asleep: WEIGHTS, and then KEYS."""
        if tag in self._asleep:
            await servers.post(f"/wake_up?tags={tag}")
            self._asleep.discard(tag)  # no error: a restart may have woken it meanwhile

    @property
    def dropped(self) -> bool:
        """Whether vLLM has dropped the weights, which must be sent again."""
        return self.level == 2 and WEIGHTS in self._asleep

    def restarted(self) -> None:
        """Called after a restart: a new process is awake."""
        self._asleep = set()


@dataclass(frozen=True, slots=True)
class ParityCheck:
    """Checks that vLLM computes with the learner's weights, by the log-probs of a text, up to a
    tolerance in nats."""

    learned: TrainedModel
    serving: ServedModel
    tolerance: float

    async def check_logprobs(self, policy: str, servers: VllmClient) -> None:
        """Raise PolicyError if vLLM's log-probs of the probe text differ from the learner's, or
        those of the probe with images."""
        body: dict[str, Json] = {"model": self.serving.name(policy), "max_tokens": 1}
        body |= {"prompt_logprobs": 0, "temperature": 1.0}
        probe = list(self.learned.probe)
        for answer in await servers.post(COMPLETIONS, body | {"prompt": probe}):
            rows = answer["choices"][0]["prompt_logprobs"]
            if difference := self._differs(policy, probe, rows):
                version = self.serving.versions[policy]
                raise PolicyError(
                    "vLLM serves different weights from the learner's after publishing version "
                    f"{version}: {difference}"
                )
        inputs = self.learned.inputs
        if inputs is None or not (messages := inputs.probe()):
            return
        body |= {"messages": messages, "return_token_ids": True}
        for answer in await servers.post(CHAT, body):
            read = inputs.read(answer["prompt_token_ids"], messages)
            if difference := self._differs(policy, read, answer["prompt_logprobs"]):
                raise PolicyError(
                    f"vLLM reads an image differently from the learner: {difference}; start "
                    "it with the policy's own preprocessor_config.json, without "
                    "--mm-processor-kwargs, and install its versions of torchvision and "
                    "transformers here"
                )

    def _differs(self, policy: str, tokens: list[int], rows: list[Any]) -> str:
        """A sentence: how vLLM's log-probs of a prompt differ from the learner's; empty: they do
        not. rows: `prompt_logprobs`; the first is None. Tokens of images have no log-probs to
        compare."""
        scored = self._scored(policy, tokens)
        served = [
            next(iter(row.values()))["logprob"] if token >= 0 else learner_logprob
            for row, token, learner_logprob in zip(rows[1:], tokens[1:], scored, strict=True)
        ]
        gaps = [abs(a - b) for a, b in zip(served, scored, strict=True)]
        worst = max(range(len(gaps)), key=lambda i: inf if isnan(gaps[i]) else gaps[i])
        if gaps[worst] <= self.tolerance:
            return ""
        return (
            f"log-prob {served[worst]:.6f} against {scored[worst]:.6f}, tolerance "
            f"{self.tolerance:g}"
        )

    async def check_temperature(self, policy: str, servers: VllmClient) -> None:
        """Raise PolicyError if vLLM's log-probs ignore the temperature that it samples at."""
        probe = list(self.learned.probe)
        body = {"model": self.serving.name(policy), "prompt": probe, "max_tokens": 8}
        body |= {"seed": 0, "logprobs": 0, "return_token_ids": True, "ignore_eos": True}
        for answer in await servers.post(COMPLETIONS, body | {"temperature": 2.0}):
            choice = answer["choices"][0]
            tokens, served = choice["token_ids"], choice["logprobs"]["token_logprobs"]
            pairs = zip(served, self._scored(policy, probe + tokens)[-len(tokens) :], strict=True)
            if all(abs(a - b) <= self.tolerance for a, b in pairs):  # log-probs at temperature 1
                raise PolicyError(
                    "vLLM returns log-probs of a distribution from which it does not sample; start "
                    "it with --logprobs-mode processed_logprobs"
                )

    def _scored(self, policy: str, tokens: list[int]) -> list[float]:
        """The learner's log-probs. Without adapters, learner and fleet name the model
        differently."""
        trained = next(iter(self.learned.adapters), POLICY)
        return self.learned.score(policy if self.serving.adapters else trained, tokens)
