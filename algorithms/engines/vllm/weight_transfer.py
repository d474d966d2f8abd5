"""vLLM's own weight transfer from GPU to GPU, driven from the learner's process.

vLLM's trainer engines do the work: with `ipc` vLLM maps the learner's memory, which must be on the
GPU that vLLM computes on; `nccl` broadcasts from the learner (rank 0) to all workers of all servers
(the other ranks), which have their own GPUs. Imports vLLM.

`send` reads the learner's current weights, so it must be called before they change again.
"""

from __future__ import annotations

import asyncio
import base64
import pickle
import socket
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from concurrent.futures import CancelledError
from typing import Any
from urllib.parse import urlsplit

from torch import Tensor
from vllm.distributed.weight_transfer.base import (
    ParamMeta,
    TrainerWeightTransferEngine,
    WeightSource,
)
from vllm.distributed.weight_transfer.factory import WeightTransferTrainerFactory
from vllm.distributed.weight_transfer.ipc_engine import IPCTrainerInitInfo
from vllm.distributed.weight_transfer.nccl_engine import NCCLTrainerInitInfo

from agentrl.algorithms.engines.vllm.fleet import VllmClient
from agentrl.algorithms.engines.vllm.protocol import (
    FINISH,
    INIT,
    START,
    UPDATE,
    ServedModel,
    TrainedModel,
    WeightSync,
)
from agentrl.core import processes
from agentrl.core.errors import PolicyError


class TransferSync(WeightSync):
    """Sends weights by one of vLLM's trainer engines, `ipc` or `nccl`."""

    def __init__(self, backend: str, learned: TrainedModel, timeout: float) -> None:
        """timeout: seconds that a transfer may take, including the rendezvous."""
        self._backend, self._learned, self._timeout = backend, learned, timeout
        self._engine: TrainerWeightTransferEngine[Any] | None = None
        self._joined: Sequence[str] = ()  # the servers in the engine's group

    @property
    def in_turn(self) -> bool:  # a broadcast goes to all servers of its group
        return self._backend != "nccl"

    def prepare(self, serving: ServedModel) -> None:
        serving.backend = self._backend
        self._learned.save(serving.weights)

    def take(self, policy: str) -> None:
        """Nothing to do: `send` reads the learner's own memory."""

    async def send(self, policy: str, servers: VllmClient) -> None:
        loop = asyncio.get_running_loop()
        sizes = [await servers.ask(url, "GET", "/get_world_size") for url in servers.urls]
        worlds = [int(size["world_size"]) for size in sizes]
        client = TransferClient(servers, worlds, loop)

        def transfer() -> None:
            if self._engine is None or self._joined != tuple(servers.urls):
                self._engine = self._join(client, servers.urls[0], 1 + sum(worlds))
                self._joined = tuple(servers.urls)
            self._engine.client = client
            self._engine.send_weights()

        try:
            async with asyncio.timeout(self._timeout):
                # A thread that hangs in NCCL must not delay the exit.
                await processes.call(transfer)
        except TimeoutError:
            client.leave()
            self._engine = None  # the engine's process group waits for a rank that may never join
            raise PolicyError(
                f"vLLM: weights by {self._backend} did not arrive within {self._timeout:g} s"
            ) from None
        except (RuntimeError, ValueError, OSError) as error:  # of NCCL, CUDA and vLLM's checks
            raise PolicyError(f"vLLM: weights could not be sent: {error}") from error

    def close(self) -> None:
        if self._engine is not None:
            self._engine.shutdown()
            self._engine = None

    def _join(
        self, client: TransferClient, url: str, world: int
    ) -> TrainerWeightTransferEngine[Any]:
        if self._backend == "ipc":
            info: Any = IPCTrainerInitInfo(rank=0)
        else:
            address, port = rendezvous(url)
            info = NCCLTrainerInitInfo(address, port, world, rank=0)
        source = LearnerWeightSource(self._learned.weights)
        return WeightTransferTrainerFactory.trainer_init(info, client=client, source=source)


class TransferClient:
    """Sends the requests of a trainer engine, which runs in a separate thread, to the servers."""

    def __init__(
        self, servers: VllmClient, worlds: Sequence[int], loop: asyncio.AbstractEventLoop
    ) -> None:
        """worlds: number of workers of each server. loop: sends the requests."""
        self._servers, self._worlds, self._loop = servers, worlds, loop
        self._stopped = False

    def leave(self) -> None:
        """Stop sending requests, so that a late transfer does not disturb the next one."""
        self._stopped = True

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
        """Number the workers of all servers consecutively as ranks."""

        async def join() -> None:
            offset, joining = init_info.get("rank_offset", 0), []
            for url, size in zip(self._servers.urls, self._worlds, strict=True):
                server_info = init_info | (
                    {"rank_offset": offset} if "rank_offset" in init_info else {}
                )
                joining.append(self._servers.ask(url, "POST", INIT, {"init_info": server_info}))
                offset += size
            await asyncio.gather(*joining)

        self._wait(join())

    def start_weight_update(self) -> None:
        self._wait(self._servers.post(START))

    def update_weights(self, update_info: dict[str, Any] | list[dict[str, Any]]) -> None:
        assert isinstance(update_info, dict), "one learner process sends the same to every worker"
        sent = dict(update_info)
        handles = sent.pop("ipc_handles", None)
        if handles is not None:  # JSON cannot carry them
            sent["ipc_handles_pickled"] = base64.b64encode(pickle.dumps(handles)).decode()
        self._wait(self._servers.post(UPDATE, {"update_info": sent}))

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        self._wait(self._servers.post(FINISH))

    def _wait(self, work: Coroutine[Any, Any, Any]) -> Any:
        if self._stopped:
            work.close()
            raise CancelledError
        return asyncio.run_coroutine_threadsafe(work, self._loop).result()


class LearnerWeightSource(WeightSource):  # type: ignore[misc]
    """The learner's weights by checkpoint name, read again in each pass."""

    def __init__(self, weights: Callable[[], Mapping[str, Tensor]]) -> None:
        self._weights = weights

    def metadata(self) -> list[ParamMeta]:
        weights = self._weights().items()
        return [ParamMeta(name, tensor.dtype, tuple(tensor.shape)) for name, tensor in weights]

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        yield from self._weights().items()


def rendezvous(url: str) -> tuple[str, int]:
    """The address of this machine as seen by a server, and a free port."""
    parts = urlsplit(url)
    host, port = parts.hostname or "", parts.port or 80
    family, _, _, _, address_of_server = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect(address_of_server)  # sends nothing
        address: str = probe.getsockname()[0]
    with socket.create_server((address, 0), family=family) as listener:
        return address, int(listener.getsockname()[1])
