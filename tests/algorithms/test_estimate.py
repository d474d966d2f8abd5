"""What memory is said to be needed, against what is taken."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from agentrl.algorithms import estimate
from agentrl.algorithms.engines.embedded.engine import Engine
from agentrl.algorithms.learners.torch import TorchLearner
from agentrl.algorithms.model import packing, products
from agentrl.algorithms.model.forward import hidden_states, prove
from agentrl.algorithms.model.lora import LoraAdapters
from agentrl.algorithms.model.packing import pack_rows
from agentrl.algorithms.proof import one_row
from agentrl.core.config import RunConfig, resolve
from tests.benchmarks.estimate import estimate_over_peak
from tests.benchmarks.learner import tokenizer

TOKENS = 64


def settings(**tables: Any) -> RunConfig:
    return resolve({"policy": {"model": "m"}, **tables}, source="test")


def llama(dtype: str, rank: int) -> tuple[Any, LoraAdapters | None]:
    """A layer of SmolLM2-135M's shape, twice."""
    torch.manual_seed(0)
    shape = LlamaConfig(
        hidden_size=576, intermediate_size=1536, num_hidden_layers=2, num_attention_heads=9,
        num_key_value_heads=3, vocab_size=512, tie_word_embeddings=True, head_dim=64,
        max_position_embeddings=512,
    )  # fmt: skip
    network = LlamaForCausalLM(shape).to(getattr(torch, dtype)).eval()
    adapters = LoraAdapters(network) if rank else None
    if adapters:
        adapters.add("policy", rank=rank, alpha=32)
    return network, adapters


@pytest.mark.parametrize("rank", [0, 16])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_what_a_layer_saves_is_within_a_tenth(dtype: str, rank: int) -> None:
    network, adapters = llama(dtype, rank)
    row = one_row([(7 * n) % 512 for n in range(TOKENS + 1)], TOKENS - 8)
    (pack,) = pack_rows([row], "trie", 1000)
    prove(network)  # else the first pass does it, and saves tensors of its own
    own = {weight.data_ptr() for weight in network.parameters()}
    saved: dict[int, tuple[int, Tensor]] = {}  # with the tensor, so that no address is used again

    def keep(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        # Copies of an adapter's weights in the base's dtype are the same for any number of tokens.
        if storage.data_ptr() not in own and len(pack.tokens) in tensor.shape:
            saved[storage.data_ptr()] = storage.nbytes(), tensor
        return tensor

    applied = adapters.using("policy") if adapters else nullcontext()
    with applied, torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        hidden_states(network, pack)
    found = sum(size for size, _ in saved.values()) / TOKENS / 2
    config = settings(policy={"model": "m", "dtype": dtype, "lora": {"rank": rank}})
    said = estimate.layer_bytes(config, network.config)
    assert said == pytest.approx(found, rel=0.1)


@pytest.mark.parametrize(("batch", "context"), [(4, 100), (2, 700)])
def test_the_cache_takes_what_is_said(batch: int, context: int) -> None:
    network, _ = llama("float32", 0)
    engine = Engine(
        network, eos=[0], max_batch=batch, max_context=min(context, 512), threads=1,
        deliver=lambda updates: None,
    )  # fmt: skip
    config = settings(engine={"max_batch": batch, "max_context": context})
    pool, shape = engine.pool, network.config
    keys = torch.zeros(1, 3, 1, 64)
    pool.set_write_positions(torch.tensor([0]), torch.tensor([0]))
    pool.update(keys, keys, 0)
    pool.reserve(min(context, 512), [0])
    written = [tensor[:, :, :, :context] for tensor in pool.tensors]  # the rest has no memory
    taken = sum(tensor.numel() * tensor.itemsize for tensor in written)
    assert estimate.bytes_needed(config, network)["KV cache"] == taken
    assert shape.max_position_embeddings == 512


@pytest.mark.parametrize("rank", [0, 4])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_engine_has_weights_a_second_time_where_it_is_said(dtype: str, rank: int) -> None:
    network, _ = llama(dtype, rank)
    policy = {"model": "m", "dtype": dtype, "device": "cpu", "lora": {"rank": rank}}
    said = estimate.bytes_needed(settings(policy=policy), network)["packed weights"]
    products.install(network)
    own = (vars(layer).get("forward") for layer in network.modules())
    layers = [each.layer for each in own if isinstance(each, products.NarrowLinear)]
    assert said == products.has_kernels() * sum(layer.weight.nbytes for layer in layers)
    assert bool(said) == (dtype == "bfloat16" and products.has_kernels())


@pytest.mark.parametrize("rank", [0, 4])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_checkpoint_takes_what_is_said_on_the_disk(dtype: str, rank: int, tmp_path: Path) -> None:
    network, adapters = llama(dtype, rank)
    learner = TorchLearner(network, tokenizer(), adapters=adapters)
    for weight in learner.optimizer.masters.values():
        weight.grad = torch.ones_like(weight)
    learner.optimizer.step(1e-3)
    learner.save(tmp_path)
    config = settings(policy={"model": "m", "dtype": dtype, "lora": {"rank": rank}})
    found = sum(file.stat().st_size for file in tmp_path.glob("*.safetensors"))
    assert estimate.checkpoint_bytes(config, network) == pytest.approx(found, rel=0.05)


def test_a_pack_is_between_a_row_and_a_batch() -> None:
    shape = LlamaConfig(max_position_embeddings=4096)
    tables = {"algorithm": {"groups": 2, "group_size": 4}, "sampling": {"max_tokens": 10}}
    engine = {"engine": {"max_context": 100}}
    rows = settings(**tables, **engine, learner={"packing": "rows"})
    assert estimate.tokens_of_step(rows, shape) == 2 * 4 * 100
    assert estimate.tokens_of_pack(rows, shape) == packing.MIN_PACK
    trie = settings(**tables, engine={"max_context": 500})
    assert estimate.tokens_of_step(trie, shape) == 2 * (500 + 3 * 10)
    assert estimate.tokens_of_pack(trie, shape) == 500 + 3 * 10
    full = settings(**tables, **engine, learner={"packing": "rows", "token_budget": 200})
    assert estimate.tokens_of_pack(full, shape) == 200
    long = settings(**tables, engine={"max_context": 900}, learner={"token_budget": 300})
    assert estimate.tokens_of_pack(long, shape) == 900


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", ["lora bf16 trie", "full fp32", "8x8 rows"])
def test_the_estimate_is_within_a_quarter_of_the_peak(tiny_model_dir: Path, name: str) -> None:
    """Of a tiny model, most of which are libraries; `make smollm` has a real one."""
    figures = estimate_over_peak(tiny_model_dir, [name])[name]
    assert 0.8 <= figures["estimate_over_peak"] <= 1.25, figures
