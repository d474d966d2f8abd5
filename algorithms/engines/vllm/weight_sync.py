"""How new weights reach vLLM servers that run already, behind one interface.

One of five methods, which `choose_sync` selects at the start by what learner and servers support:

    adapter         LoRA alone: a small directory, which vLLM loads by name
    ipc             one GPU: vLLM maps the learner's own memory (`weight_transfer`)
    nccl            different GPUs: broadcast from one to the others (`weight_transfer`)
    shared_memory   one machine: vLLM reads a copy of the weights in memory
    reload          a shared disk: vLLM reads a checkpoint from a directory

`ipc`, `nccl` and `shared_memory` are engines of vLLM's weight-transfer API, one of which a server
is started with. Always true: `send` is called while the servers answer no call, and may be called
again.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from agentrl.algorithms.engines.vllm.serving import MEMORY, ServedModel, TrainedModel
from agentrl.errors import PolicyError
from agentrl.types import Json

ALIGNMENT = 64  # bytes
INIT, START = "/init_weight_transfer_engine", "/start_weight_update"
UPDATE, FINISH = "/update_weights", "/finish_weight_update"
LOAD, UNLOAD = "/v1/load_lora_adapter", "/v1/unload_lora_adapter"


class LostError(Exception):
    """A request failed as it does on a server that is dying."""


class VllmServers(Protocol):
    """Those that weights go to. Raises PolicyError for what one of them refuses, and LostError."""

    @property
    def urls(self) -> Sequence[str]: ...

    async def post(self, path: str, body: Json = None, *, missing: bool = False) -> list[Any]:
        """What each answers. missing: 404 is an answer too."""
        ...

    async def ask(self, url: str, method: str, path: str, body: Json = None) -> Any:
        """What one of them answers."""
        ...


class WeightSync(Protocol):
    """Carries the learner's weights of every policy that it was asked to take them of."""

    def prepare(self, serving: ServedModel) -> None:
        """Write what a server starts from, and say there how it is to be started."""
        ...

    def take(self, policy: str) -> None:
        """The learner's current weights are the policy's newest from now on."""
        ...

    async def send(self, policy: str, servers: VllmServers) -> None:
        """The servers have the policy's newest weights; what they computed with others they may
        still remember."""
        ...

    def close(self) -> None: ...


class AdapterSync:
    """Each version of an adapter is a directory, as peft writes it.

    A name is taken from its old version and given to the new one: vLLM's `load_inplace` would have
    it read the files again at every forward pass."""

    def __init__(self, learned: TrainedModel, folder: Path) -> None:
        self._learned, self._folder = learned, folder
        self._files: dict[str, Path] = {}
        self._written = 0

    def prepare(self, serving: ServedModel) -> None:
        assert self._learned.save_base is not None
        self._learned.save_base(serving.weights)

    def take(self, policy: str) -> None:
        assert self._learned.save_adapter is not None
        self._learned.save_adapter(policy, self._next(policy))

    async def send(self, policy: str, servers: VllmServers) -> None:
        name: dict[str, Json] = {"lora_name": policy}
        await servers.post(UNLOAD, name, missing=True)
        await servers.post(LOAD, name | {"lora_path": str(self._files[policy])})
        for old in self._folder.glob("adapter-*"):
            if old not in self._files.values():
                shutil.rmtree(old)

    def forget(self, policy: str) -> None:
        shutil.rmtree(self._files.pop(policy))

    async def drop(self, policy: str, servers: VllmServers) -> None:
        """The servers have it no more, if they had it at all."""
        await servers.post(UNLOAD, {"lora_name": policy}, missing=True)

    def close(self) -> None:
        """Files go with their folder."""

    def _next(self, policy: str) -> Path:
        self._written += 1
        self._files[policy] = self._folder / f"adapter-{self._written}"
        return self._files[policy]


class CheckpointSync:
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

    def close(self) -> None:
        """Files go with their folder."""


class SharedMemorySync:
    """A copy of the newest weights in memory that vLLM's workers map: see `worker_extension`.

    The memory has no name in any directory, and goes with this process."""

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
        for told, tensor in zip(self._weights, weights.values(), strict=True):
            start, size = told["start"], tensor.nbytes
            self._memory[start : start + size].view(tensor.dtype).view(tensor.shape).copy_(tensor)

    async def send(self, policy: str, servers: VllmServers) -> None:
        where = {"path": f"/proc/{os.getpid()}/fd/{self._file}", "size": self._memory.numel()}
        await servers.post(INIT, {"init_info": where})
        await _begin(servers)
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


async def _begin(servers: VllmServers) -> None:
    """Have an update begun, also where a learner that was killed left one that was."""
    try:
        await servers.post(START)
    except LostError:
        for url in servers.urls:
            with suppress(LostError):
                await servers.ask(url, "POST", FINISH)
        await servers.post(START)


@dataclass(frozen=True, slots=True)
class SyncCapabilities:
    """What learner and servers can do."""

    adapters: str = "all weights are trained"  # why they cannot be loaded by name; empty: they can
    backend: str | None = ""  # of vLLM's engines, as the servers were started; None: as we choose
    gpu: bool = False  # the learner's weights are on one
    shared: bool = False  # and vLLM computes on that one
    alone: bool = False  # and on no other
    memory: bool = hasattr(os, "memfd_create")  # as Linux has it


def choose_sync(asked: str, means: SyncCapabilities) -> tuple[str, str]:
    """The way that new weights take, and why.

    asked: `engine.vllm.sync`. Raises PolicyError where that way cannot be taken."""
    reasons = _impossible(means)
    if asked == "auto":
        passed: list[str] = []
        for way, reason in reasons.items():
            if not reason:
                return way, "; ".join(passed) or "it is the fastest"
            passed.append(f"not {way}: {reason}")
    for way, reason in reasons.items():
        if way == asked and not reason:
            return way, f"engine.vllm.sync = {asked!r}"
    raise PolicyError(f"engine.vllm.sync = {asked!r}: {dict(reasons)[asked]}; choose another")


def _impossible(means: SyncCapabilities) -> dict[str, str]:
    """Why a way cannot be taken, empty where it can; the fastest way comes first."""
    gpu = "" if means.gpu else "the learner is not on a GPU (policy.device)"
    shared = "vLLM is on the learner's GPU" if means.shared else ""
    alone = "" if means.shared and means.alone else "vLLM is not on the learner's GPU alone"
    memory = "" if means.memory else "this system has no memfd_create"
    return {
        "adapter": means.adapters,
        "ipc": gpu or alone or _unstarted(means, "ipc"),
        "nccl": gpu or shared or _unstarted(means, "nccl"),
        "shared_memory": memory or _unstarted(means, MEMORY),
        "reload": "",
    }


def _unstarted(means: SyncCapabilities, backend: str) -> str:
    if means.backend in (None, backend):
        return ""
    return f"""vLLM was not started with --weight-transfer-config '{{"backend": "{backend}"}}'"""


def make_sync(way: str, learned: TrainedModel, folder: Path, timeout: float) -> WeightSync:
    """timeout: seconds that a broadcast may take."""
    if way == "adapter":
        return AdapterSync(learned, folder)
    if way == "shared_memory":
        return SharedMemorySync(learned)
    if way == "reload":
        return CheckpointSync(learned, folder)
    from agentrl.algorithms.engines.vllm.weight_transfer import TransferSync  # imports vLLM

    return TransferSync(way, learned, timeout)
