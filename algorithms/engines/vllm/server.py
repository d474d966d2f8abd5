"""The policy server for vLLM, in a child process or on servers that are managed elsewhere, as
`[engine]` of the run file selects.

A publish takes the learner's weights (`weights`) and transfers them to the servers (`delivery`),
again if vLLM dies meanwhile. With `in_flight` weights change while vLLM is paused between two
steps, one server after another: running calls continue with keys of the new weights, and name the
versions of their tokens (see `protocol`); a new version of an adapter is loaded in addition to the
old version, which running calls keep. A server that ends is restarted with the newest published
weights under the same URL; its calls in flight fail like a lost connection.
"""

from __future__ import annotations

import asyncio
import dataclasses
import json
import logging
import secrets
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import aclosing, asynccontextmanager, nullcontext
from pathlib import Path
from typing import Any

import msgspec
import torch

from agentrl.algorithms.data.batch import TokenRow
from agentrl.algorithms.engines.vllm.delivery import ParityCheck, SleepCycle, WeightDelivery
from agentrl.algorithms.engines.vllm.fleet import VllmFleet
from agentrl.algorithms.engines.vllm.process import (
    PARSER_OPTION,
    UPDATE_TIMEOUT,
    VllmProcess,
    gpus_taken,
    names_parser,
)
from agentrl.algorithms.engines.vllm.protocol import LostError, TrainedModel, VllmHost
from agentrl.algorithms.engines.vllm.weights import NewestWeights
from agentrl.algorithms.estimate import vllm_share
from agentrl.algorithms.model.attention import context_length
from agentrl.algorithms.model.chat import Tokenizer
from agentrl.algorithms.model.forward import forward_logprobs
from agentrl.algorithms.model.lm_head import computing_with
from agentrl.algorithms.model.load import Adapters, checkpoint_weights
from agentrl.algorithms.model.packing import pack_rows
from agentrl.algorithms.model.scaled import Inputs, inputs_of
from agentrl.algorithms.model.tool_formats import TOOL_FORMAT
from agentrl.algorithms.proof import tolerance
from agentrl.core.access import read_sent_key
from agentrl.core.config import RunConfig
from agentrl.core.config.derived import snapshots_served
from agentrl.core.config.infrastructure import VllmConfig, VllmEngineConfig
from agentrl.core.errors import PolicyError
from agentrl.core.types import POLICY

log = logging.getLogger(__name__)
MAX_RESTARTS = 3  # between two publishes
CRASH_GRACE = 15.0  # seconds to wait after a failed request for the server to end


class VllmServer:
    """A PolicyServer with a copy of the learner's weights. Invariant: only the holder of
    `_changing` changes weights, one change at a time. Outside of a change calls are admitted, and
    each is answered by the version that its response names; after a failed publish calls wait for
    one that succeeds, because they would be answered with wrong weights."""

    def __init__(
        self,
        learned: TrainedModel,
        host: VllmHost,
        *,
        folder: Path,
        method: str = "auto",
        timeout: float = UPDATE_TIMEOUT,
        tolerance: float = 1e-3,
        in_flight: bool = False,
        sleep: int = 0,
    ) -> None:
        """folder: for the files that servers read, used only by this server; a fleet must see it
        under the same path. method: see `choose_sync`. timeout: seconds for calls in flight to end
        before an update, and for vLLM to load the update. tolerance: largest difference in
        log-probs after a publish. in_flight: a publish outside `updating` pauses calls instead of
        waiting for their end. sleep: see `SleepCycle`."""
        self.model, self.base_url = POLICY, ""
        self.host = host
        self._trained = len(learned.adapters)
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
        """See `PolicyServer.publish`. Raises PolicyError for a policy that is not served, and if
        vLLM's log-probs differ from the learner's afterwards; calls then wait until a publish
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

    def make_room(self, policies: int) -> None:
        """Before `start`: for further adapters that will be added."""
        room = self._trained + policies
        self.host.max_adapters = max(self.host.max_adapters, room)

    async def add(self, policy: str, version: int) -> None:
        """See `PolicyServer.add`. Also raises PolicyError if there is no room for another
        adapter."""
        self._check_adapters(policy)
        if policy not in self._versions and len(self._versions) >= self.host.max_adapters:
            raise PolicyError(
                f"vLLM has room for {self.host.max_adapters} adapters and serves"
                f" {', '.join(self._versions)}; let fewer play at once"
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
        """Start vLLM with the newest weights, and admit calls unless weights are changing."""
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
                        log.warning("%s is back but cannot be used: %s", server, error)
                        continue
                    await self.host.adopt(server)
                    if not self._publish_failed:
                        await self.delivery.open(server)
                    log.info("%s is back, with the newest weights.", server)


class Restarts:
    """Whether vLLM is up. Invariant: after the first start `up` is set exactly while vLLM answers
    with the newest weights, or after it was given up (then `failed` has the reason), so no waiter
    of `up` waits for a server that never starts. Writer: only the task of `watch`."""

    def __init__(
        self, host: VllmHost, start: Callable[[], Awaitable[None]], may_start: asyncio.Event
    ) -> None:
        """start: starts vLLM with the newest weights. may_start: set while vLLM may take GPU
        memory; any work sets it."""
        self.up = asyncio.Event()
        self.failed: PolicyError | None = None
        self._host, self._start, self._may_start = host, start, may_start
        self._death, self._given_up = asyncio.Event(), asyncio.Event()
        self._since_publish = 0

    async def repeat(self, work: Callable[[], Awaitable[None]]) -> None:
        """Run `work` once the server is up, and again after a restart if the server dies
        meanwhile."""
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
        """Allow MAX_RESTARTS restarts again."""
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
            await self._may_start.wait()  # until then the learner uses the server's memory
            await self._restart()
            self.up.set()
        self._given_up.set()

    async def _restart(self) -> None:
        reason = self._host.failure_reason()
        log.warning("vLLM ended and is restarted with the newest weights; %s", reason)
        while self._since_publish < MAX_RESTARTS:
            self._since_publish += 1
            try:
                await self._start()
                return
            except (PolicyError, LostError, OSError) as error:
                reason = str(error)
        self.failed = PolicyError(f"vLLM ended {MAX_RESTARTS + 1} times in one step; {reason}")


# A child reserves room for at least this many, including those of evaluations and live versions.
MIN_ADAPTERS = 8
PROBE = "The quick brown fox jumps over the lazy dog."


def vllm_server(
    config: RunConfig,
    model: Any,
    tokenizer: Tokenizer,
    adapters: Adapters | None = None,
    name: str = POLICY,
) -> VllmServer:
    """The server for vLLM, as a child process or at `engine.vllm.urls`. Every publish sends it the
    weights of `model` or its adapters."""
    engine, dtype = config.engine, config.policy.dtype
    assert isinstance(engine, VllmEngineConfig)
    learned = _trained_model(model, tokenizer, adapters, engine.threads or 1)
    in_flight = config.algorithm.samples_during_update
    folder = Path(config.output, "vllm").absolute()
    folder.mkdir(parents=True, exist_ok=True)
    host: VllmHost
    if engine.vllm.urls:
        host = VllmFleet(
            engine.vllm.urls,
            host=engine.host,
            port=engine.port,
            api_key=read_sent_key(engine.vllm.key_env, "engine.vllm.key_env", "the servers'"),
            access=engine.access,
            # Less than the limit of the whole update, so that a single hanging server is detected
            # first.
            timeout=0.9 * UPDATE_TIMEOUT,
            adapters=bool(learned.adapters),
        )
    else:
        context = min(engine.max_context, context_length(model) or engine.max_context)
        tool_format = tokenizer.init_kwargs.get(TOOL_FORMAT) or "hermes"
        if ":" in tool_format and not names_parser(engine.vllm.arguments):
            raise PolicyError(
                f"policy.tool_format = {tool_format!r}: vLLM cannot read it; set "
                f"engine.vllm.arguments = ['{PARSER_OPTION}', ...], with a plug-in of vLLM"
            )
        room = len(learned.adapters) + snapshots_served(config)
        host = VllmProcess(
            msgspec.structs.replace(engine, max_context=context),
            folder / "vllm.log",
            secrets.token_hex(16),
            dtype=dtype,
            gpu=learned.gpu >= 0,
            tool_format=tool_format,
            adapters=max(MIN_ADAPTERS, room) if adapters else 0,
            rank=learned.rank,
            side_by_side=in_flight,
            memory=_gpu_memory(config, engine.vllm, model),
            media=_media(learned.inputs),
        )
    return VllmServer(
        learned,
        host,
        folder=folder / "served",
        method=engine.vllm.sync,
        tolerance=tolerance(config.policy),
        in_flight=in_flight,
        sleep=engine.vllm.sleep,
    )


def _media(inputs: Inputs | None) -> tuple[str, ...]:
    """Arguments of a child for an image-text model."""
    if inputs is None:
        return ()
    limits = {"video": 0} if inputs.probe() else {"video": 0, "image": 0}
    return "--limit-mm-per-prompt", json.dumps(limits)


def _gpu_memory(config: RunConfig, vllm: VllmConfig, model: Any) -> float:
    """Fraction of the GPU's memory for a vLLM child; 0: vLLM's default. Raises PolicyError if the
    learner leaves too little, and for settings that need a GPU without one."""
    if model.device.type != "cuda":
        if vllm.sleep or vllm.gpu_memory:
            raise PolicyError(
                "engine.vllm.sleep and engine.vllm.gpu_memory need a GPU, and the policy is on "
                f"{model.device.type}; remove them"
            )
        return 0.0
    if (model.device.index or 0) >= gpus_taken(vllm.arguments):
        return vllm.gpu_memory  # vLLM has separate GPUs
    total = torch.cuda.get_device_properties(model.device).total_memory
    return vllm.gpu_memory or vllm_share(config, model, total)


def _trained_model(
    model: Any, tokenizer: Tokenizer, adapters: Adapters | None, threads: int
) -> TrainedModel:
    inputs = inputs_of(model)

    @torch.no_grad()
    def score(policy: str, tokens: Sequence[int]) -> list[float]:
        applied = nullcontext() if adapters is None else adapters.using(policy)
        # vLLM computes at the same time, and with more threads than cores everything is a hundred
        # times slower.
        with computing_with(threads), applied:
            return _logprobs(model, tokens) if inputs is None else _logprobs_of_text(model, tokens)

    def complete(save: Callable[[Path], None]) -> Callable[[Path], None]:
        """Write the files of the image processor next to the weights, as in a checkpoint of the
        hub."""

        def saved(directory: Path) -> None:
            save(directory)
            if inputs is not None:
                inputs.save(directory)
                tokenizer.save_pretrained(directory)

        return saved

    trained = TrainedModel(
        save=complete(model.save_pretrained),
        weights=lambda: checkpoint_weights(model, model.state_dict()),
        save_tokenizer=tokenizer.save_pretrained,
        score=score,
        probe=tokenizer(PROBE)["input_ids"],
        inputs=inputs,
        gpu=(model.device.index or 0) if model.device.type == "cuda" else -1,
    )
    if adapters is None:
        return trained
    first = adapters.names[0]
    return dataclasses.replace(
        trained,
        save=complete(lambda directory: adapters.merge(first, directory)),
        weights=lambda: checkpoint_weights(model, adapters.merged(first)),
        adapters=adapters.names,
        save_base=complete(adapters.save_base),
        save_adapter=adapters.save,
        rank=max(map(adapters.rank, adapters.names)),
    )


def _logprobs(model: Any, tokens: Sequence[int]) -> list[float]:
    row = torch.tensor(tokens, device=model.device)
    logprobs = model(row[None]).logits[0, :-1].float().log_softmax(-1)
    scores: list[float] = logprobs.gather(1, row[1:, None])[:, 0].tolist()
    return scores


def _logprobs_of_text(model: Any, tokens: Sequence[int]) -> list[float]:
    """`TrainedModel.score` for ids that include tokens of images."""
    row = torch.tensor(tokens)
    text = (row[1:] >= 0).nonzero().flatten() + 1
    ones = torch.ones(len(text))
    actions = TokenRow(row, text, ones, ones, torch.zeros_like(text))
    (pack,) = pack_rows([actions], "rows", len(tokens))
    scores = torch.zeros(len(tokens) - 1)
    scores[text - 1] = forward_logprobs(model, pack).float().cpu()
    logprobs: list[float] = scores.tolist()
    return logprobs
