"""A base in 4 or 8 bits under an adapter, by bitsandbytes' kernels for the CPU."""

from __future__ import annotations

import asyncio
import json
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch

from agentrl.algorithms.model.load import load_model
from agentrl.algorithms.model.lora import LoraAdapters
from agentrl.algorithms.model.lora_targets import load_quantized
from agentrl.algorithms.train.policies import LoadedModel
from agentrl.core.config import LoraConfig, PolicyConfig, RunConfig
from agentrl.core.config.run_file import resolve
from agentrl.core.errors import ConfigError

pytestmark = [
    pytest.mark.skipif(find_spec("bitsandbytes") is None, reason="bitsandbytes is not installed"),
    pytest.mark.filterwarnings("ignore:MatMul8bitLt"),
]
BITS = ["4bit", "8bit"]
TOKENS = torch.arange(40, 72)[None]


@pytest.fixture(params=BITS)
def packed(request: pytest.FixtureRequest, tiny_model_dir: Path) -> tuple[str, LoadedModel]:
    """A quantised model with an adapter that changes something."""
    model, tokenizer = load_quantized(str(tiny_model_dir), request.param, "float32", "cpu")
    adapters = LoraAdapters(model)
    adapters.add("policy", rank=4, alpha=8.0)
    with torch.no_grad():
        for parameter in adapters.parameters("policy").values():
            parameter.normal_(std=0.02)
    loaded = LoadedModel(str(tiny_model_dir), model, tokenizer, adapters, ["policy"])
    return request.param, loaded


def logprobs(model: Any) -> torch.Tensor:
    with torch.no_grad():
        found: torch.Tensor = model(TOKENS).logits.float().log_softmax(-1)
    return found


def test_weights_are_smaller_and_the_adapter_learns(
    packed: tuple[str, LoadedModel], tiny_model_dir: Path
) -> None:
    bits, loaded = packed
    whole, _ = load_model(tiny_model_dir, device="cpu")
    linear = "model.layers.0.mlp.up_proj"
    own = loaded.model.get_submodule(linear).base_layer.weight
    full = whole.get_submodule(linear).weight
    assert own.nbytes * (8 if bits == "4bit" else 4) <= full.nbytes
    assert loaded.adapters is not None
    with loaded.adapters.using("policy"):
        loss = -loaded.model(TOKENS).logits.float().log_softmax(-1)[..., 7].sum()
        loss.backward()
    parameters = loaded.adapters.parameters("policy").values()
    assert all(p.grad is not None and p.grad.abs().sum() > 0 for p in parameters)
    assert all(p.grad is None for p in loaded.model.parameters() if not p.requires_grad)


def test_the_adapter_learns_the_same_after_something_was_sampled(
    packed: tuple[str, LoadedModel],
) -> None:
    _, loaded = packed
    assert loaded.adapters is not None
    parameters = loaded.adapters.parameters("policy").values()
    gradients = []
    for _ in range(2):
        with loaded.adapters.using("policy"):
            summed = loaded.model(TOKENS).logits.float().log_softmax(-1)[..., 7].sum()
            gradients.append(torch.autograd.grad(summed, tuple(parameters)))
        logprobs(loaded.model)
    for before, after in zip(*gradients, strict=True):
        assert torch.allclose(before, after, rtol=1e-4, atol=1e-6)


def test_what_is_served_elsewhere_is_the_policy_that_learned(
    packed: tuple[str, LoadedModel], tmp_path: Path
) -> None:
    from agentrl.algorithms.proof import tolerance

    bits, loaded = packed
    assert loaded.adapters is not None
    with loaded.adapters.using("policy"):
        learned = logprobs(loaded.model)
    loaded.adapters.merge("policy", tmp_path / "merged")
    loaded.adapters.save_base(tmp_path / "base")
    loaded.tokenizer.save_pretrained(tmp_path / "merged")
    config = json.loads((tmp_path / "merged" / "config.json").read_text())
    assert "quantization_config" not in config
    merged, _ = load_model(tmp_path / "merged", device="cpu")
    allowed = tolerance(PolicyConfig(quantize=bits))  # type: ignore[arg-type]
    assert (logprobs(merged) - learned).abs().max() < allowed
    loaded.tokenizer.save_pretrained(tmp_path / "base")
    base, _ = load_model(tmp_path / "base", device="cpu")
    with loaded.adapters.using(None):
        assert (logprobs(base) - logprobs(loaded.model)).abs().max() < allowed
    assert (logprobs(base) - logprobs(merged)).abs().max() > 0.01  # the adapter does something


def test_an_adapter_outlives_its_quantised_base(
    packed: tuple[str, LoadedModel], tmp_path: Path
) -> None:
    from agentrl.models.export import export_merged

    _, loaded = packed
    assert loaded.adapters is not None
    loaded.adapters.save("policy", tmp_path / "adapter")
    again = loaded.adapters.read("policy", tmp_path / "adapter")
    loaded.adapters.restore("policy", again)
    export_merged(tmp_path / "adapter", tmp_path / "exported")
    assert (tmp_path / "exported" / "model.safetensors").is_file()


def test_learner_and_sampler_agree_as_far_as_the_doctor_allows(
    packed: tuple[str, LoadedModel], tmp_path: Path
) -> None:
    from agentrl.algorithms.proof import tolerance, trie_gap
    from agentrl.doctor import policy as proofs

    bits, loaded = packed
    policy = PolicyConfig(quantize=bits, lora=LoraConfig(rank=4))  # type: ignore[arg-type]
    config = RunConfig(policy=policy, output=str(tmp_path))
    gap = trie_gap(loaded.model, loaded.tokenizer)
    assert gap is not None
    assert gap.within(policy), gap

    status, sentence = asyncio.run(proofs.sampler(loaded, config))
    assert status == "ok", sentence
    assert f", {tolerance(policy):g} is allowed" in sentence


def test_weights_that_nobody_could_train_are_refused() -> None:
    for settings in ({}, {"lora": {"rank": 4}}):
        policy = {"model": "m", "quantize": "4bit", **settings}
        learner = {"kind": "verl"} if settings else {}
        with pytest.raises(ConfigError, match=r"policy\.quantize: set policy\.lora\.rank too"):
            resolve({"policy": policy, "learner": learner}, source="run.toml")
