"""vLLM's own transfer engines as the learner drives them, as far as they go without a GPU."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Sequence
from importlib.util import find_spec
from typing import Any

import pytest
import torch

from agentrl.algorithms.engines.vllm.protocol import ServedModel, TrainedModel
from agentrl.core.errors import PolicyError

if find_spec("vllm") is None:
    pytest.skip("vLLM is not installed: run `make test-engines`", allow_module_level=True)

from vllm.distributed.weight_transfer import ipc_engine, nccl_engine

from agentrl.algorithms.engines.vllm import weights

WEIGHTS = {"a": torch.arange(6.0).view(2, 3), "b": torch.ones(4, dtype=torch.bfloat16)}
LEARNED = TrainedModel(
    lambda path: None, lambda: WEIGHTS, lambda path: None, lambda *_: [], [], gpu=0
)


class Workers:
    """Two servers with workers of their own, which parse what they are asked as vLLM does."""

    urls: Sequence[str] = ("http://127.0.0.1:1", "http://127.0.0.1:2")
    worlds = (2, 1)

    def __init__(self, infos: tuple[type, type]) -> None:
        self.joined: dict[str, Any] = {}
        self.asked: list[str] = []
        self.updates: list[Any] = []
        self.infos = infos
        self.hang = False

    async def post(self, path: str, body: Any = None, *, missing: bool = False) -> list[Any]:
        self.asked.append(path)
        if path == weights.UPDATE:
            self.updates.append(self.infos[1](**body["update_info"]))
        return [None, None]

    async def ask(self, url: str, method: str, path: str, body: Any = None) -> Any:
        if path == "/get_world_size":
            return {"world_size": self.worlds[self.urls.index(url)]}
        assert path == weights.INIT
        if self.hang:
            await asyncio.Event().wait()
        self.joined[url] = self.infos[0](**body["init_info"])
        return None


@pytest.fixture
def nccl(monkeypatch: pytest.MonkeyPatch) -> list[torch.Tensor]:
    """What is broadcast, with nobody there to receive it."""
    sent: list[torch.Tensor] = []

    def broadcast(iterator: Any, post_iter_func: Any, **given: Any) -> None:
        sent.extend(post_iter_func(item) for item in iterator)

    monkeypatch.setattr(nccl_engine, "open_trainer_endpoint", lambda info: object())
    monkeypatch.setattr(nccl_engine, "packed_nccl_broadcast_producer", broadcast)
    return sent


def workers_of_nccl() -> Workers:
    return Workers(
        (nccl_engine.NCCLWeightTransferInitInfo, nccl_engine.NCCLWeightTransferUpdateInfo)
    )


async def test_a_broadcast_reaches_every_worker_of_every_server(nccl: list[torch.Tensor]) -> None:
    workers = workers_of_nccl()
    transfer = weights.make_sync("nccl", LEARNED, None, 5.0)  # type: ignore[arg-type]
    serving = ServedModel(None, None)  # type: ignore[arg-type]
    transfer.prepare(serving)
    assert serving.backend == "nccl"
    for _ in range(2):
        await transfer.send("policy", workers)
    assert [workers.joined[url].rank_offset for url in workers.urls] == [1, 3]
    assert {info.world_size for info in workers.joined.values()} == {4}
    assert {info.master_address for info in workers.joined.values()} == {"127.0.0.1"}
    assert workers.asked == [weights.START, weights.UPDATE, weights.FINISH] * 2
    assert workers.updates[1].names == ["a", "b"]
    assert workers.updates[1].dtype_names == ["float32", "bfloat16"]
    assert workers.updates[1].shapes == [[2, 3], [4]]
    torch.testing.assert_close(nccl, list(WEIGHTS.values()) * 2)

    before = dict(workers.joined)
    workers.urls, workers.worlds = workers.urls[1:], (1,)
    await transfer.send("policy", workers)  # one is gone: a group with its ranks would wait
    assert workers.joined[workers.urls[0]] != before[workers.urls[0]]
    assert workers.joined[workers.urls[0]].world_size == 2
    transfer.close()
    transfer.close()


async def test_a_broadcast_that_hangs_is_a_sentence_in_time(
    nccl: list[torch.Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    never = threading.Event()
    monkeypatch.setattr(nccl_engine, "open_trainer_endpoint", lambda info: never.wait())
    transfer, workers = weights.make_sync("nccl", LEARNED, None, 0.2), workers_of_nccl()  # type: ignore[arg-type]
    with pytest.raises(PolicyError, match=r"by nccl did not arrive within 0\.2 s"):
        await transfer.send("policy", workers)
    (late,) = [thread for thread in threading.enumerate() if thread.name == "agentrl-call"]
    never.set()
    await asyncio.to_thread(late.join)
    assert not workers.asked


async def test_what_nccl_refuses_is_a_sentence(
    nccl: list[torch.Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(info: object) -> None:
        raise RuntimeError("NCCL error: no CUDA device")

    monkeypatch.setattr(nccl_engine, "open_trainer_endpoint", refuse)
    transfer = weights.make_sync("nccl", LEARNED, None, 5.0)  # type: ignore[arg-type]
    with pytest.raises(PolicyError, match="could not be sent: NCCL error: no CUDA device"):
        await transfer.send("policy", workers_of_nccl())


async def test_handles_of_gpu_memory_arrive_as_they_were_made(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Properties:
        uuid = "GPU-1"

    monkeypatch.setenv("VLLM_ALLOW_INSECURE_SERIALIZATION", "1")
    monkeypatch.setattr(torch.accelerator, "current_device_index", lambda: 0)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: Properties)
    monkeypatch.setattr(torch.cuda, "ipc_collect", lambda: None)
    monkeypatch.setattr(ipc_engine, "reduce_tensor", lambda tensor: (None, (tensor.shape, 7)))
    workers = Workers(
        (ipc_engine.IPCWeightTransferInitInfo, ipc_engine.IPCWeightTransferUpdateInfo)
    )
    workers.urls, workers.worlds = workers.urls[:1], (1,)
    await weights.make_sync("ipc", LEARNED, None, 5.0).send("policy", workers)  # type: ignore[arg-type]
    assert workers.asked == [weights.START, weights.UPDATE, weights.FINISH]
    (update,) = workers.updates
    assert update.names == ["a", "b"]
    assert update.ipc_handles == [
        {"GPU-1": (WEIGHTS["a"].shape, 7)},
        {"GPU-1": (WEIGHTS["b"].shape, 7)},
    ]
