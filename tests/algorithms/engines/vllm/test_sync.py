"""The ways that new weights take to vLLM, without vLLM: what is chosen, written and asked for."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from agentrl.algorithms.engines.vllm import weights as weight_sync
from agentrl.algorithms.engines.vllm.protocol import MEMORY, ServedModel, TrainedModel
from agentrl.algorithms.engines.vllm.weights import SyncCapabilities, choose_sync
from agentrl.algorithms.model.load import checkpoint_weights, load_model
from agentrl.core.errors import PolicyError

CHILD = SyncCapabilities(backend=None)


@pytest.mark.parametrize(
    ("means", "way", "why"),
    [
        (SyncCapabilities(adapters="", backend=None), "adapter", "it is the fastest"),
        (CHILD, "shared_memory", "not adapter: all weights are trained; not ipc: the learner is"),
        (
            SyncCapabilities(backend=None, memory=False),
            "reload",
            "shared_memory: this system has no memfd",
        ),
        (
            SyncCapabilities(backend=None, gpu=True, shared=True, alone=True),
            "ipc",
            "not adapter: all",
        ),
        (
            SyncCapabilities(backend=None, gpu=True, shared=True),
            "shared_memory",
            "not on the learner's GPU a",
        ),
        (
            SyncCapabilities(backend=None, gpu=True),
            "nccl",
            "not ipc: vLLM is not on the learner's GPU",
        ),
        (SyncCapabilities(backend="nccl", gpu=True), "nccl", "not ipc"),
        (SyncCapabilities(backend="nccl"), "reload", "not nccl: the learner is not on a GPU"),
        (SyncCapabilities(backend=MEMORY), "shared_memory", "not nccl"),
        (
            SyncCapabilities(),
            "reload",
            """with --weight-transfer-config '{"backend": "agentrl"}'""",
        ),
    ],
)
def test_the_fastest_way_that_there_is_and_why_not_a_faster_one(
    means: SyncCapabilities, way: str, why: str
) -> None:
    chosen, reason = choose_sync("auto", means)
    assert chosen == way
    assert why in reason


@pytest.mark.parametrize(
    ("asked", "means", "message"),
    [
        ("nccl", CHILD, "'nccl': the learner is not on a GPU"),
        ("ipc", CHILD, "'ipc': the learner is not on a GPU"),
        (
            "nccl",
            SyncCapabilities(backend=None, gpu=True, shared=True),
            "vLLM is on the learner's GPU",
        ),
        (
            "ipc",
            SyncCapabilities(backend="nccl", gpu=True, shared=True, alone=True),
            "was not started with",
        ),
        ("adapter", CHILD, "all weights are trained; choose another"),
        ("shared_memory", SyncCapabilities(), "was not started with --weight-transfer-config"),
    ],
)
def test_a_way_that_is_asked_for_and_is_none_is_a_sentence(
    asked: str, means: SyncCapabilities, message: str
) -> None:
    with pytest.raises(PolicyError, match=rf"engine\.vllm\.sync = '{asked}': .*") as raised:
        choose_sync(asked, means)
    assert message in str(raised.value)
    assert choose_sync("reload", means)[0] == "reload"


class Asked:
    """Servers that answer everything, and what they were asked."""

    urls: Sequence[str] = ("a",)

    def __init__(self) -> None:
        self.asked: list[tuple[str, Any]] = []

    async def post(self, path: str, body: Any = None, *, missing: bool = False) -> list[Any]:
        self.asked.append((path, body))
        return [None]

    async def ask(self, url: str, method: str, path: str, body: Any = None) -> Any:
        raise AssertionError(path)


def learned(weights: Mapping[str, Tensor]) -> TrainedModel:
    def save(directory: Path) -> None:
        directory.mkdir()
        torch.save(dict(weights), directory / "weights")

    return TrainedModel(
        save,
        lambda: weights,
        save,
        lambda policy, tokens: [],
        [],
        save_base=save,
        save_adapter=lambda policy, directory: save(directory),
    )


def weights() -> dict[str, Tensor]:
    return {"odd": torch.randn(3, 5), "half": torch.randn(7).bfloat16(), "scalar": torch.ones(())}


async def test_what_is_in_the_memory_is_what_was_taken_last(tmp_path: Path) -> None:
    current = weights()
    memory = weight_sync.make_sync("shared_memory", learned(current), tmp_path, 1.0)
    serving, servers = ServedModel(tmp_path / "w", tmp_path / "t"), Asked()
    memory.prepare(serving)
    assert serving.backend == MEMORY
    memory.take("policy")
    taken = {name: tensor.clone() for name, tensor in current.items()}
    for tensor in current.values():
        tensor.add_(1)
    await memory.send("policy", servers)
    paths = [path for path, _ in servers.asked]
    assert paths == [weight_sync.INIT, weight_sync.START, weight_sync.UPDATE, weight_sync.FINISH]
    where, layout = servers.asked[0][1]["init_info"], servers.asked[2][1]["update_info"]["weights"]

    def read() -> dict[str, Tensor]:
        mapped = torch.from_file(where["path"], shared=True, size=where["size"], dtype=torch.uint8)
        return {
            told["name"]: mapped[told["start"] :][: taken[told["name"]].nbytes]
            .view(getattr(torch, told["dtype"]))
            .view(told["shape"])
            for told in layout
        }

    torch.testing.assert_close(read(), taken, rtol=0, atol=0)
    memory.take("policy")
    torch.testing.assert_close(read(), current, rtol=0, atol=0)
    memory.close()
    assert not Path(where["path"]).exists()
    memory.close()


async def test_a_version_has_a_name_until_no_call_runs_under_it(tmp_path: Path) -> None:
    """With `load_inplace` vLLM would read it again at every forward pass."""
    adapters = weight_sync.make_sync("adapter", learned(weights()), tmp_path, 1.0)
    assert isinstance(adapters, weight_sync.AdapterSync)
    servers = Asked()
    serving = ServedModel(tmp_path / "w", tmp_path / "t", adapters=True)
    adapters.prepare(serving)
    for version in range(2):
        for policy in ("policy", "other"):
            serving.versions[policy] = version
            adapters.take(policy)
            await adapters.send(policy, servers)
    assert [path for path, _ in servers.asked] == [weight_sync.UNLOAD, weight_sync.LOAD] * 4
    loads = [body for path, body in servers.asked if path == weight_sync.LOAD]
    assert [body["lora_name"] for body in loads] == ["policy#0", "other#0", "policy#1", "other#1"]
    assert not any("load_inplace" in body for body in loads)
    await adapters.drop(["policy#0"], servers)
    assert servers.asked[8:] == [(weight_sync.UNLOAD, {"lora_name": "other#0"})]
    left = {Path(body["lora_path"]) for body in loads if body["lora_name"] != "other#0"}
    assert set(tmp_path.glob("adapter-*")) == left
    del serving.versions["other"]
    await adapters.drop([], servers)
    assert set(tmp_path.glob("adapter-*")) == {Path(loads[2]["lora_path"])}


async def test_a_checkpoint_is_read_from_where_it_was_written_last(tmp_path: Path) -> None:
    checkpoints = weight_sync.make_sync("reload", learned(weights()), tmp_path, 1.0)
    serving, servers = ServedModel(tmp_path / "w", tmp_path / "t"), Asked()
    checkpoints.prepare(serving)
    for _ in range(2):
        checkpoints.take("policy")
        await checkpoints.send("policy", servers)
        sent = servers.asked[-1][1]
        assert sent == {
            "method": "reload_weights",
            "kwargs": {"weights_path": str(serving.weights)},
        }
        assert list(tmp_path.glob("weights-*")) == [serving.weights]


def test_weights_have_the_names_of_a_checkpoint(tiny_model_dir: Path, tmp_path: Path) -> None:
    """What is shared is there once."""
    from safetensors.torch import load_file

    model: Any = load_model(tiny_model_dir, device="cpu")[0]
    model.save_pretrained(tmp_path)
    found = checkpoint_weights(model, model.state_dict())
    torch.testing.assert_close(dict(found), load_file(tmp_path / "model.safetensors"))
