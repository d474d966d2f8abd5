"""How new weights reach vLLM servers that run already, behind one interface.

One of five methods, which `choose_sync` selects at the start by what learner and servers support:

    adapter         LoRA alone: a small directory, which vLLM loads by name
    ipc             one GPU: vLLM maps the learner's own memory (`weight_transfer`)
    nccl            different GPUs: broadcast from one to the others (`weight_transfer`)
    shared_memory   one machine: vLLM reads a copy of the weights in memory
    reload          a shared disk: vLLM reads a checkpoint from a directory

`ipc`, `nccl` and `shared_memory` are engines of vLLM's weight-transfer API, one of which a server
is started with. Always true: `send` is called while requests are held, and may be called again.
"""

from __future__ import annotations

import os
import shutil
from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import takewhile
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from agentrl.algorithms.engines.vllm.serving import MEMORY, LostError, ServedModel, TrainedModel
from agentrl.errors import PolicyError
from agentrl.types import Json

ALIGNMENT = 64  # bytes
INIT, START = "/init_weight_transfer_engine", "/start_weight_update"
UPDATE, FINISH = "/update_weights", "/finish_weight_update"
LOAD, UNLOAD = "/v1/load_lora_adapter", "/v1/unload_lora_adapter"


class VllmServers(Protocol):
    """The servers that weights are sent to. Raises PolicyError for a refusal, and LostError."""

    @property
    def urls(self) -> Sequence[str]: ...

    async def post(self, path: str, body: Json = None, *, missing: bool = False) -> list[Any]:
        """The response of each. missing: 404 is allowed."""

    async def ask(self, url: str, method: str, path: str, body: Json = None) -> Any:
        """The response of one of them."""


class WeightSync(ABC):
    """Sends the learner's weights to vLLM, as they were at the last `take` of each policy."""

    @property
    def in_turn(self) -> bool:
        """Whether they may be sent to one server after another."""
        return True

    @abstractmethod
    def prepare(self, serving: ServedModel) -> None:
        """Write the files that a server starts from, and set in `serving` how it is started."""

    @abstractmethod
    def take(self, policy: str) -> None:
        """Remember the learner's current weights as the policy's newest."""

    @abstractmethod
    async def send(self, policy: str, servers: VllmServers) -> None:
        """Send the policy's newest weights. Prefix caches of older weights are not cleared."""

    def close(self) -> None:  # noqa: B027 - files go with their folder
        """Free what is held outside the folder."""


class AdapterSync(WeightSync):
    """Each version of an adapter is a directory, as peft writes it, and has a name of its own at
    vLLM: calls that run under an older one end under it. A version that is sent again is loaded
    anew: with `load_inplace` vLLM would read the files again at every forward pass."""

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

    async def send(self, policy: str, servers: VllmServers) -> None:
        assert self._serving is not None, "prepare() comes first"
        name = self._serving.name(policy)
        await servers.post(UNLOAD, {"lora_name": name}, missing=True)
        path = str(self._files[name])
        await servers.post(LOAD, {"lora_name": name, "lora_path": path})

    async def drop(self, used: Collection[str], servers: VllmServers) -> None:
        """Unload what is neither current nor among these names, and delete its files."""
        assert self._serving is not None, "prepare() comes first"
        kept = {*used, *map(self._serving.name, self._serving.versions)}
        for name in self._files.keys() - kept:
            await servers.post(UNLOAD, {"lora_name": name}, missing=True)
            del self._files[name]
        for old in self._folder.glob("adapter-*"):
            if old not in self._files.values():
                shutil.rmtree(old)


class CheckpointSync(WeightSync):
    """Each version is a whole checkpoint, from the newest of which a server starts."""

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

    async def send(self, policy: str, servers: VllmServers) -> None:
        assert self._serving is not None
        newest = self._serving.weights
        kwargs: dict[str, Json] = {"weights_path": str(newest)}
        await servers.post("/collective_rpc", {"method": "reload_weights", "kwargs": kwargs})
        for old in self._folder.glob("weights-*"):
            if old != newest:
                shutil.rmtree(old)


class SharedMemorySync(WeightSync):
    """A copy of the newest weights in memory that vLLM's workers map: see `worker_extension`.

    The memory is anonymous and freed with this process."""

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

    async def send(self, policy: str, servers: VllmServers) -> None:
        where = {"path": f"/proc/{os.getpid()}/fd/{self._file}", "size": self._memory.numel()}
        await servers.post(INIT, {"init_info": where})
        try:
            await servers.post(START)
        except LostError:  # a learner that was killed left an update unfinished: end it
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
    """What learner and servers support."""

    adapters: str = "all weights are trained"  # why they cannot be loaded by name; empty: they can
    backend: str | None = ""  # the engine that servers were started with; None: any can be chosen
    gpu: bool = False  # the learner's weights are on one
    shared: bool = False  # and vLLM computes on that one
    alone: bool = False  # and on no other
    memory: bool = hasattr(os, "memfd_create")  # as Linux has it
    failed: Mapping[str, str] = field(default_factory=dict)  # why, by method, when it was tried


def choose_sync(asked: str, can: SyncCapabilities) -> tuple[str, str]:
    """The method by which new weights are sent, and why.

    asked: `engine.vllm.sync`. Raises PolicyError where that method is impossible."""
    reasons = _impossible(can)
    if asked == "auto":
        passed = list(takewhile(lambda item: item[1], reasons.items()))
        why = "; ".join(f"not {method}: {reason}" for method, reason in passed)
        return list(reasons)[len(passed)], why or "it is the fastest"
    if reasons[asked]:
        raise PolicyError(f"engine.vllm.sync = {asked!r}: {reasons[asked]}; choose another")
    return asked, f"engine.vllm.sync = {asked!r}"


def _impossible(can: SyncCapabilities) -> dict[str, str]:
    """Why each method is impossible, empty where it is not; the fastest comes first."""
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
    """timeout: seconds that a broadcast may take."""
    if method == "adapter":
        return AdapterSync(learned, folder)
    if method == "shared_memory":
        return SharedMemorySync(learned)
    if method == "reload":
        return CheckpointSync(learned, folder)
    from agentrl.algorithms.engines.vllm.weight_transfer import TransferSync  # imports vLLM

    return TransferSync(method, learned, timeout)
