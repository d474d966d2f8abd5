"""vLLM's own weight transfer from GPU to GPU, driven from the learner's process.

Its trainer engines do the work: `ipc` has vLLM map the learner's memory, which must be on the GPU
that vLLM computes on; `nccl` broadcasts from the learner, which is rank 0 of a group whose other
ranks are all workers of all servers, to GPUs of their own. Imports vLLM.

Weights are read from the learner at `send`: it is called before they change again.
"""

from __future__ import annotations

import asyncio
import base64
import pickle
import socket
import threading
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from concurrent.futures import CancelledError, Future, InvalidStateError
from contextlib import suppress
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

from agentrl.algorithms.engines.vllm.serving import ServedModel, TrainedModel
from agentrl.algorithms.engines.vllm.weight_sync import (
    FINISH,
    INIT,
    START,
    UPDATE,
    LostError,
    VllmServers,
)
from agentrl.errors import PolicyError


class TransferSync:
    """A WeightSync by one of vLLM's trainer engines, `ipc` or `nccl`."""

    def __init__(self, backend: str, learned: TrainedModel, timeout: float) -> None:
        """timeout: seconds that a transfer may take, the rendezvous included."""
        self._backend, self._learned, self._timeout = backend, learned, timeout
        self._engine: TrainerWeightTransferEngine[Any] | None = None
        self._joined: Sequence[str] = ()  # the servers that the engine sends to

    def prepare(self, serving: ServedModel) -> None:
        serving.backend = self._backend
        self._learned.save(serving.weights)

    def take(self, policy: str) -> None:
        """Nothing: they are where they are sent from."""

    async def send(self, policy: str, servers: VllmServers) -> None:
        loop = asyncio.get_running_loop()
        sizes = [await servers.ask(url, "GET", "/get_world_size") for url in servers.urls]
        worlds = [int(size["world_size"]) for size in sizes]
        client = TransferClient(servers, worlds, lambda work: _wait(loop, work))

        def transfer() -> None:
            if self._engine is None or self._joined != tuple(servers.urls):
                self._engine = self._join(client, servers.urls[0], 1 + sum(worlds))
                self._joined = tuple(servers.urls)
            self._engine.client = client
            self._engine.send_weights()

        try:
            async with asyncio.timeout(self._timeout):
                await _in_thread(transfer)
        except TimeoutError:
            client.leave()
            self._engine = None  # its group waits for a rank that may never come
            raise PolicyError(
                f"vLLM: weights by {self._backend} did not arrive within {self._timeout:g} s "
                "(engine.vllm.timeout)"
            ) from None

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
    """What a trainer engine asks of the servers, from its own thread."""

    def __init__(
        self,
        servers: VllmServers,
        worlds: Sequence[int],
        wait: Callable[[Coroutine[Any, Any, Any]], Any],
    ) -> None:
        """worlds: workers of each server. wait: runs what is awaitable, from any thread."""
        self._servers, self._worlds, self._await = servers, worlds, wait
        self._left = False

    def leave(self) -> None:
        """Ask no more: a transfer that is late must not disturb the next one."""
        self._left = True

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
        """Each server's workers are ranks after those of the server before it."""

        async def join() -> None:
            offset, joining = init_info.get("rank_offset", 0), []
            for url, size in zip(self._servers.urls, self._worlds, strict=True):
                own = init_info | ({"rank_offset": offset} if "rank_offset" in init_info else {})
                joining.append(self._servers.ask(url, "POST", INIT, {"init_info": own}))
                offset += size
            await asyncio.gather(*joining)

        self._wait(join())

    def start_weight_update(self) -> None:
        self._wait(self._servers.post(START))

    def update_weights(self, update_info: dict[str, Any] | list[dict[str, Any]]) -> None:
        assert isinstance(update_info, dict), "one learner process sends the same to every worker"
        told = dict(update_info)
        handles = told.pop("ipc_handles", None)
        if handles is not None:  # no JSON has them
            told["ipc_handles_pickled"] = base64.b64encode(pickle.dumps(handles)).decode()
        self._wait(self._servers.post(UPDATE, {"update_info": told}))

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        self._wait(self._servers.post(FINISH))

    def _wait(self, work: Coroutine[Any, Any, Any]) -> Any:
        if self._left:
            work.close()
            raise CancelledError
        return self._await(work)


class LearnerWeightSource(WeightSource):  # type: ignore[misc]
    """The learner's weights under the names of a checkpoint, read anew in each pass."""

    def __init__(self, weights: Callable[[], Mapping[str, Tensor]]) -> None:
        self._weights = weights

    def metadata(self) -> list[ParamMeta]:
        weights = self._weights().items()
        return [ParamMeta(name, tensor.dtype, tuple(tensor.shape)) for name, tensor in weights]

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        yield from self._weights().items()


def rendezvous(url: str) -> tuple[str, int]:
    """Address of this machine as a server sees it, and a port that is free."""
    parts = urlsplit(url)
    host, port = parts.hostname or "", parts.port or 80
    family, _, _, _, there = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, socket.SOCK_DGRAM) as towards:
        towards.connect(there)  # sends nothing
        address: str = towards.getsockname()[0]
    with socket.socket(family) as listener:
        listener.bind((address, 0))
        return address, int(listener.getsockname()[1])


def _wait(loop: asyncio.AbstractEventLoop, work: Coroutine[Any, Any, Any]) -> Any:
    return asyncio.run_coroutine_threadsafe(work, loop).result()


async def _in_thread(work: Callable[[], None]) -> None:
    """`work` in a thread that nobody waits for at the end: one that hangs in NCCL never ends."""
    done: Future[None] = Future()

    def run() -> None:
        with suppress(InvalidStateError, CancelledError):  # nobody waits any more
            try:
                work()
            except (RuntimeError, ValueError, OSError, PolicyError, LostError) as error:
                done.set_exception(error)
            else:
                done.set_result(None)

    threading.Thread(target=run, name="vllm-transfer", daemon=True).start()
    try:
        await asyncio.wrap_future(done)
    except (RuntimeError, ValueError, OSError) as error:  # of NCCL, CUDA and vLLM's own checks
        raise PolicyError(f"vLLM: weights could not be sent: {error}") from error
