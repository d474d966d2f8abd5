"""Sends new weights to running vLLM servers, by one of five methods behind one interface.

`choose_sync` selects the method at the start by the capabilities of learner and servers:

    adapter         LoRA only: a small directory, which vLLM loads by name
    ipc             one GPU: vLLM maps the learner's own memory (`weight_transfer`)
    nccl            different GPUs: broadcast from one to the others (`weight_transfer`)
    shared_memory   one machine: vLLM reads a copy of the weights in memory
    reload          a shared disk: vLLM reads a checkpoint from a directory

`ipc`, `nccl` and `shared_memory` are backends of vLLM's weight-transfer API, one of which a server
is started with. Always true: `send` is called while requests are held, and may be called again.
"""

from __future__ import annotations

import os
import shutil
from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import takewhile
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from agentrl.algorithms.engines.vllm.client import VllmClient
from agentrl.algorithms.engines.vllm.serving import (
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
)
from agentrl.errors import PolicyError
from agentrl.types import Json

ALIGNMENT = 64  # bytes


class WeightSync(ABC):
    """Sends to vLLM the weights that the learner had at the last `take` of each policy."""

    @property
    def in_turn(self) -> bool:
        """Whether weights can be sent to one server after another."""
        return True

    @abstractmethod
    def prepare(self, serving: ServedModel) -> None:
        """Write the files that a server starts with, and set their paths in `serving`."""

    @abstractmethod
    def take(self, policy: str) -> None:
        """Remember the learner's current weights as the policy's newest."""

    @abstractmethod
    async def send(self, policy: str, servers: VllmClient) -> None:
        """Send the policy's newest weights. Does not clear prefix caches."""

    def close(self) -> None:  # noqa: B027 - files go with their folder
        """Free resources outside the folder."""


class AdapterSync(WeightSync):
    """Writes each version of an adapter to a directory in peft's format, with a name of its own at
    vLLM, so running calls keep theirs. A version that is sent again is unloaded and loaded: with
    `load_inplace` vLLM would read the files at every forward pass."""

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
        kept = {*used, *map(self._serving.name, self._serving.versions)}
        for name in self._files.keys() - kept:
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

    adapters: str = "all weights are trained"  # why none can be loaded by name; empty: they can be
    backend: str | None = ""  # the backend that servers were started with; None: any can be chosen
    gpu: bool = False  # the learner's weights are on a GPU
    shared: bool = False  # vLLM computes on that GPU
    alone: bool = False  # vLLM computes on one GPU only
    memory: bool = hasattr(os, "memfd_create")  # on Linux
    failed: Mapping[str, str] = field(default_factory=dict)  # methods tried before -> reason


def choose_sync(asked: str, can: SyncCapabilities) -> tuple[str, str]:
    """Choose the method that sends new weights; returns it and the reason.

    asked: `engine.vllm.sync`. Raises PolicyError if that method is impossible."""
    reasons = _impossible(can)
    if asked == "auto":
        passed = list(takewhile(lambda item: item[1], reasons.items()))
        why = "; ".join(f"not {method}: {reason}" for method, reason in passed)
        return list(reasons)[len(passed)], why or "it is the fastest"
    if reasons[asked]:
        raise PolicyError(f"engine.vllm.sync = {asked!r}: {reasons[asked]}; choose another")
    return asked, f"engine.vllm.sync = {asked!r}"


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
