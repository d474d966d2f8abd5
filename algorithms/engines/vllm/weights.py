"""The newest weights of each policy, and five methods to send them to running vLLM servers.

`choose_sync` selects the method at the start by the capabilities of learner and servers:

    adapter         LoRA only: a small directory, which vLLM loads by name
    ipc             one GPU: vLLM maps the learner's own memory (`weight_transfer`)
    nccl            different GPUs: broadcast from one to the others (`weight_transfer`)
    shared_memory   one machine: vLLM reads a copy of the weights in memory
    reload          a shared disk: vLLM reads a checkpoint from a directory

`ipc`, `nccl` and `shared_memory` are backends of vLLM's weight-transfer API, one of which a server
is started with. Invariant: `send` is called while requests are held, and may be repeated.
"""

from __future__ import annotations

import logging
import os
import shutil
from collections.abc import Collection, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import takewhile
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from agentrl.algorithms.engines.vllm.fleet import VllmClient
from agentrl.algorithms.engines.vllm.protocol import (
    FINISH,
    INIT,
    LOAD,
    MEMORY,
    START,
    UNLOAD,
    UPDATE,
    LostError,
    ServedModel,
    TrainedModel,
    VllmHost,
    WeightSync,
)
from agentrl.core.errors import PolicyError
from agentrl.core.types import Json

log = logging.getLogger(__name__)


class NewestWeights:
    """The weights that every server should have.

    Invariant: after `prepare`, `serving` names the files that a server starts with and the version
    of each policy at its last `take`. `send` transfers exactly these weights and may be repeated,
    so a server that starts or reconnects at any time can be brought up to date. A method that has
    failed is not chosen again. Writer: the `VllmServer`."""

    def __init__(
        self, learned: TrainedModel, host: VllmHost, folder: Path, method: str, timeout: float
    ) -> None:
        """folder: emptied by `prepare`, deleted by `close`. method: see `choose_sync`. timeout:
        seconds for a transfer."""
        self.serving = ServedModel(folder / "weights", folder / "tokenizer")
        self._learned, self._host, self._folder = learned, host, folder
        self._requested_method, self._timeout = method, timeout
        self._method = ""  # the chosen one
        self._sync: WeightSync | None = None
        self._failed: dict[str, str] = {}  # method -> reason

    def prepare(self, *, in_flight: bool) -> str:
        """Choose how weights are sent, and write the files that a server starts with; returns the
        policy that answers by default. in_flight: weights will change during calls."""
        method, why = self._choose()
        adapters = self._learned.adapters
        if in_flight and method != "adapter" and not self._host.spans:
            log.warning(
                "A call that crosses an update reports only the version of its first token; start "
                "vLLM with --middleware agentrl.algorithms.engines.vllm.protocol.SpanMiddleware."
            )
        if method != "adapter" and len(adapters) > 1:
            raise PolicyError(
                f"vLLM can serve one of the policies {', '.join(adapters)}, not all, because "
                f"{self._host.refuses_adapters}"
            )
        level = logging.WARNING if self._failed else logging.INFO
        log.log(level, "vLLM gets new weights by %s (%s).", method, why)
        shutil.rmtree(self._folder, ignore_errors=True)  # left by a killed run
        self._folder.mkdir(parents=True)
        self.serving.weights, self.serving.backend = self._folder / "weights", ""
        self._learned.save_tokenizer(self.serving.tokenizer)
        self._sync = make_sync(method, self._learned, self._folder, self._timeout)
        self.serving.adapters = method == "adapter"
        names = adapters if self.serving.adapters else [self._host.name]
        self.serving.versions = dict.fromkeys(names, 0)
        self._sync.prepare(self.serving)
        for policy in names:
            self._sync.take(policy)
        self._method = method
        return names[0]

    def _choose(self) -> tuple[str, str]:
        gpu = self._learned.gpu
        capabilities = SyncCapabilities(
            adapters=self._host.refuses_adapters,
            backend=self._host.backend,
            gpu=gpu >= 0,
            shared=0 <= gpu < self._host.gpus,
            alone=self._host.gpus == 1,
            failed=self._failed,
        )
        return choose_sync(self._requested_method, capabilities)

    def allows_another(self, error: Exception) -> bool:
        """Whether `prepare` may choose another method after the first transfer failed."""
        if (
            self._requested_method != "auto"
            or self._method == "reload"
            or len(self.serving.versions) > 1
        ):
            return False
        self._sent.close()
        self._failed[self._method] = f"it failed here ({error})"
        return True

    @property
    def in_turn(self) -> bool:
        """Whether weights can be sent to one server after another."""
        return self._sent.in_turn

    def take(self, policy: str, version: int) -> None:
        """Make the learner's current weights the newest version of a policy."""
        sync = self._sent
        self.serving.versions[policy] = version
        sync.take(policy)

    async def send(self, policy: str, servers: VllmClient) -> None:
        """Send the newest weights of a policy to `servers`, whose calls are held or paused, or use
        another version of the adapter."""
        await self._sent.send(policy, servers)

    @property
    def adapters(self) -> AdapterSync | None:
        """The method if it loads adapters by name; servers may then still have old versions."""
        return self._sync if isinstance(self._sync, AdapterSync) else None

    def close(self) -> None:
        if self._sync is not None:
            self._sync.close()
            self._sync = None
        shutil.rmtree(self._folder, ignore_errors=True)

    @property
    def _sent(self) -> WeightSync:
        assert self._sync is not None, "start() comes first"
        return self._sync


ALIGNMENT = 64  # bytes


class AdapterSync(WeightSync):
    """Writes each version of an adapter to a directory in peft's format and loads it under a
    separate name, so running calls keep their version. A version that is sent again is unloaded and
    loaded: with `load_inplace` vLLM would read the files at every forward pass."""

    def __init__(self, learned: TrainedModel, folder: Path) -> None:
        self._learned, self._folder = learned, folder
        self._serving: ServedModel | None = None
        self._files: dict[str, Path] = {}  # by name at vLLM
        self._written = 0

    def prepare(self, serving: ServedModel) -> None:
        assert self._learned.save_base is not None
        self._learned.save_base(serving.weights)
        self._serving = serving

    def take(self, policy: str) -> None:
        assert self._learned.save_adapter is not None
        assert self._serving is not None, "prepare() comes first"
        self._written += 1
        path = self._folder / f"adapter-{self._written}"
        self._learned.save_adapter(policy, path)
        self._files[self._serving.name(policy)] = path

    async def send(self, policy: str, servers: VllmClient) -> None:
        assert self._serving is not None, "prepare() comes first"
        name = self._serving.name(policy)
        await servers.post(UNLOAD, {"lora_name": name}, missing=True)
        path = str(self._files[name])
        await servers.post(LOAD, {"lora_name": name, "lora_path": path})

    async def drop(self, used: Collection[str], servers: VllmClient) -> None:
        """Unload versions that are neither current nor in use, and delete their files."""
        assert self._serving is not None, "prepare() comes first"
        needed = {*used, *map(self._serving.name, self._serving.versions)}
        for name in self._files.keys() - needed:
            await servers.post(UNLOAD, {"lora_name": name}, missing=True)
            del self._files[name]
        for old in self._folder.glob("adapter-*"):
            if old not in self._files.values():
                shutil.rmtree(old)


class CheckpointSync(WeightSync):
    """Writes each version as a whole checkpoint; a server starts with the newest."""

    def __init__(self, learned: TrainedModel, folder: Path) -> None:
        self._learned, self._folder = learned, folder
        self._serving: ServedModel | None = None
        self._written = 0

    def prepare(self, serving: ServedModel) -> None:
        self._serving = serving

    def take(self, policy: str) -> None:
        assert self._serving is not None, "prepare() comes first"
        self._written += 1
        self._serving.weights = self._folder / f"weights-{self._written}"
        self._learned.save(self._serving.weights)

    async def send(self, policy: str, servers: VllmClient) -> None:
        assert self._serving is not None
        newest = self._serving.weights
        kwargs: dict[str, Json] = {"weights_path": str(newest)}
        await servers.post("/collective_rpc", {"method": "reload_weights", "kwargs": kwargs})
        for old in self._folder.glob("weights-*"):
            if old != newest:
                shutil.rmtree(old)


class SharedMemorySync(WeightSync):
    """Copies the newest weights to memory that vLLM's workers map: see `worker_extension`.

    The memory is anonymous, so it is freed with this process."""

    def __init__(self, learned: TrainedModel) -> None:
        self._learned = learned
        self._file = -1
        self._memory = torch.empty(0, dtype=torch.uint8)
        self._weights: list[dict[str, Any]] = []

    def prepare(self, serving: ServedModel) -> None:
        serving.backend = MEMORY
        self._learned.save(serving.weights)

    def take(self, policy: str) -> None:
        weights = self._learned.weights()
        if self._file < 0:
            self._allocate(weights)
        for entry, tensor in zip(self._weights, weights.values(), strict=True):
            start, size = entry["start"], tensor.nbytes
            self._memory[start : start + size].view(tensor.dtype).view(tensor.shape).copy_(tensor)

    async def send(self, policy: str, servers: VllmClient) -> None:
        where = {"path": f"/proc/{os.getpid()}/fd/{self._file}", "size": self._memory.numel()}
        await servers.post(INIT, {"init_info": where})
        try:
            await servers.post(START)
        except LostError:  # a killed learner left an unfinished update: finish it
            for url in servers.urls:
                with suppress(LostError):
                    await servers.ask(url, "POST", FINISH)
            await servers.post(START)
        await servers.post(UPDATE, {"update_info": {"weights": self._weights}})
        await servers.post(FINISH)

    def close(self) -> None:
        if self._file >= 0:
            os.close(self._file)
            self._file = -1

    def _allocate(self, weights: Mapping[str, Tensor]) -> None:
        size = 0
        for name, tensor in weights.items():
            kind = str(tensor.dtype).removeprefix("torch.")
            shape = list(tensor.shape)
            self._weights.append({"name": name, "dtype": kind, "shape": shape, "start": size})
            size += -(-tensor.nbytes // ALIGNMENT) * ALIGNMENT
        self._file = os.memfd_create("agentrl-weights")
        os.truncate(self._file, size)
        path = f"/proc/self/fd/{self._file}"
        self._memory = torch.from_file(path, shared=True, size=size, dtype=torch.uint8)


@dataclass(frozen=True, slots=True)
class SyncCapabilities:
    """The common capabilities of learner and servers."""

    adapters: str = "all weights are trained"  # why adapters cannot be loaded; empty: they can
    backend: str | None = ""  # the backend that servers were started with; None: any can be chosen
    gpu: bool = False  # the learner's weights are on a GPU
    shared: bool = False  # vLLM computes on that GPU
    alone: bool = False  # vLLM computes on one GPU only
    memory: bool = hasattr(os, "memfd_create")  # on Linux
    failed: Mapping[str, str] = field(default_factory=dict)  # methods tried before -> reason


def choose_sync(requested: str, can: SyncCapabilities) -> tuple[str, str]:
    """Choose the method that sends new weights; returns it and the reason.

    requested: `engine.vllm.sync`. Raises PolicyError if that method is impossible."""
    reasons = _impossible(can)
    if requested == "auto":
        passed = list(takewhile(lambda item: item[1], reasons.items()))
        why = "; ".join(f"not {method}: {reason}" for method, reason in passed)
        return list(reasons)[len(passed)], why or "it is the fastest"
    if reasons[requested]:
        raise PolicyError(f"engine.vllm.sync = {requested!r}: {reasons[requested]}; choose another")
    return requested, f"engine.vllm.sync = {requested!r}"


def _impossible(can: SyncCapabilities) -> dict[str, str]:
    """The methods, fastest first, each with the reason why it is impossible; empty: possible."""
    gpu = "" if can.gpu else "the learner is not on a GPU (policy.device)"
    shared = "vLLM is on the learner's GPU" if can.shared else ""
    alone = "" if can.shared and can.alone else "vLLM is not on the learner's GPU alone"
    memory = "" if can.memory else "this system has no memfd_create"

    def unstarted(backend: str) -> str:
        option = f"""--weight-transfer-config '{{"backend": "{backend}"}}'"""
        return "" if can.backend in (None, backend) else f"vLLM was not started with {option}"

    return {
        "adapter": can.adapters,
        "ipc": gpu or alone or unstarted("ipc"),
        "nccl": gpu or shared or unstarted("nccl"),
        "shared_memory": memory or unstarted(MEMORY),
        "reload": "",
        **can.failed,
    }


def make_sync(method: str, learned: TrainedModel, folder: Path, timeout: float) -> WeightSync:
    """Build a method of `choose_sync`. timeout: seconds that a transfer may take."""
    if method == "adapter":
        return AdapterSync(learned, folder)
    if method == "shared_memory":
        return SharedMemorySync(learned)
    if method == "reload":
        return CheckpointSync(learned, folder)
    from agentrl.algorithms.engines.vllm.weight_transfer import TransferSync  # imports vLLM

    return TransferSync(method, learned, timeout)
