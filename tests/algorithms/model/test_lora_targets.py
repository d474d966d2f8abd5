"""What adapters are on, for classes with routers, fused experts and layers that are not called."""

from __future__ import annotations

import logging
from pathlib import Path

import peft
import pytest
import torch
import transformers
from packaging.version import Version
from safetensors.torch import load_file
from torch import Tensor

from agentrl.algorithms.model.load import checkpoint_weights, load_model
from agentrl.algorithms.model.lora import LoraAdapters
from agentrl.algorithms.train.load_policies import load_policies
from agentrl.core.config import resolve
from agentrl.core.errors import PolicyError
from tests.benchmarks.model_classes import build, names
from tests.benchmarks.models_lora import built, compare_resume, compare_with_peft

# The version of transformers in which some classes call other layers than in 5.10.
NEW = Version(transformers.__version__) >= Version("5.24")


def needs(kind: str) -> pytest.MarkDecorator:
    return pytest.mark.skipif(kind not in names(), reason="transformers has no such class")


def adapters_of(base: Path, *, experts: bool = True) -> LoraAdapters:
    return LoraAdapters(load_model(base, device="cpu")[0], experts=experts)


def randomise(adapters: LoraAdapters, name: str, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    for parameter in adapters.parameters(name).values():
        torch.nn.init.normal_(parameter, std=0.2, generator=generator)


@torch.no_grad()
def hidden(adapters: LoraAdapters) -> Tensor:
    found: Tensor = adapters.model(torch.arange(3, 12)[None]).logits
    return found


@pytest.mark.parametrize(
    ("name", "on"),
    [
        ("qwen3_moe", "8 linear layers and 4 stacks of experts, which have 74% of"),
        ("deepseek_v3", "16 linear layers and 2 stacks of experts"),  # of which six have names
        ("deepseek_v2", "16 linear layers and 2 stacks of experts"),  # that peft takes for experts
        ("gpt_oss", "8 linear layers and 4 stacks of experts"),  # [experts, in, out]
        ("jamba", "10 linear layers and 2 stacks of experts" if NEW else
         "11 linear layers and 2 stacks of experts"),
        ("mamba", "4 linear layers, which have 50% of the model's weights; not adapted: 4 layers "
         "whose weights the model reads without calling them" if NEW else
         "6 linear layers, which have 52% of the model's weights; not adapted: 2 layers "
         "whose weights the model reads without calling them"),
        ("falcon", "8 linear layers"),  # of a class derived from Linear
        ("gpt2", "8 linear layers"),  # Conv1D
        # experts that are called by expert
        ("granitemoe", "8 linear layers and 4 stacks" if NEW else "8 linear layers, which have"),
    ],
)  # fmt: skip
def test_adapters_are_those_of_peft_in_every_kind_of_class(name: str, on: str) -> None:
    with built(name) as (base, work):
        assert on in compare_with_peft(base, work)


@pytest.mark.parametrize("name", ["qwen3_moe", "gemma3", "youtu"])
def test_runs_with_experts_and_frozen_weights_resume(name: str) -> None:
    for lora in (True, False):
        with built(name) as (base, work):
            compare_resume(base, work, lora=lora)


@pytest.mark.parametrize(
    ("name", "router"),
    [
        ("mixtral", "model.layers.0.mlp.gate"),  # no linear layer, but peft's ParamWrapper
        ("deepseek_v2", "model.layers.1.mlp.gate"),
        ("afmoe", "model.layers.1.mlp.router.gate"),
        ("granitemoe", f"model.layers.0.block_sparse_moe.router{'' if NEW else '.layer'}"),
        ("hunyuan_v1_moe", "model.layers.0.mlp.gate.wg"),
        ("longcat_flash", "model.layers.0.mlp.router.classifier"),
    ],
)
def test_routers_are_never_adapted(name: str, router: str) -> None:
    model = build(name)
    adapters = LoraAdapters(model)
    assert router in dict(model.named_modules())
    adapters.add("policy", rank=2, alpha=4.0)
    assert not any(key.startswith(router) for key in adapters.parameters("policy"))
    assert not any(hasattr(model.get_submodule(router), side) for side in ("lora_A", "base_layer"))
    target = router.rpartition(".")[2]
    with pytest.raises(PolicyError, match=rf"targets: .*{target}"):
        adapters.add("other", rank=2, alpha=4.0, targets=[target])


@needs("deepseek_v4")
def test_a_layer_that_is_not_linear_or_called_has_no_adapter() -> None:
    targets = LoraAdapters(build("deepseek_v4")).targets
    grouped = [path for path in targets.left_out if path.endswith("o_a_proj")]
    assert grouped
    assert not any(path.endswith("o_a_proj") for path in targets.layers)
    shared = LoraAdapters(build("gemma3")).targets  # its vision tower is not text
    assert all(path.startswith("model.language_model") for path in shared.layers)


@needs("laguna")
def test_what_peft_would_not_read_again_is_refused() -> None:
    """peft 0.21 reads `shared_experts` as `shared_experts.` there, and so nothing."""
    with pytest.raises(PolicyError, match=r"peft would not read an adapter on .*shared_experts"):
        LoraAdapters(build("laguna")).add("policy", rank=2, alpha=4.0)


def test_names_of_experts_are_targets_and_each_token_has_its_own(tiny_moe_dir: Path) -> None:
    adapters = adapters_of(tiny_moe_dir)
    adapters.add("both", rank=2, alpha=4.0, targets=["experts"])
    adapters.add("attention", rank=2, alpha=4.0, targets=["q_proj"])
    for seed, name in enumerate(("both", "attention")):
        randomise(adapters, name, seed)
    path = "model.layers.0.mlp.experts"
    assert {f"{path}.lora_A", f"{path}.base_layer.lora_A"} <= adapters.parameters("both").keys()
    with pytest.raises(PolicyError, match="for policies that share a base the same"):
        adapters.add("down", rank=2, alpha=4.0, targets=["down_proj"])
    experts = adapters.model.get_submodule(path)
    x = torch.randn(6, 32, generator=torch.Generator().manual_seed(0))
    routing = (
        torch.tensor([[0, 1], [2, 3], [1, 2], [3, 0], [0, 2], [1, 3]]),
        torch.full((6, 2), 0.5),
    )
    alone = {}
    with torch.no_grad():
        for name in ("both", None):
            with adapters.using(name):
                alone[name] = experts(x, *routing)
        with adapters.routed([("both", torch.tensor([0, 4])), ("attention", torch.tensor([1]))]):
            mixed = experts(x, *routing)
    assert (alone["both"] - alone[None]).abs().max() > 0.01
    for token in range(6):
        own = alone["both" if token in (0, 4) else None]
        torch.testing.assert_close(mixed[token], own[token], rtol=0, atol=1e-6)


@pytest.mark.skipif(
    Version(peft.__version__) < Version("0.19"),
    reason="peft 0.18 refuses a second adapter on parameters, which is a PolicyError",
)
def test_copies_and_duplicates_have_the_experts_too(tiny_moe_dir: Path) -> None:
    adapters = adapters_of(tiny_moe_dir)
    adapters.add("policy", rank=2, alpha=4.0)
    randomise(adapters, "policy", 0)
    with adapters.using("policy"):
        wanted = hidden(adapters)
    copied = adapters.copy()
    adapters.keep_reference("policy")
    randomise(adapters, "policy", 1)
    kept = adapters.reference("policy")
    for of, name in ((copied, "policy"), (adapters, kept)):
        with of.using(name):
            torch.testing.assert_close(hidden(of), wanted, rtol=0, atol=0)
    with adapters.using("policy"):
        assert (hidden(adapters) - wanted).abs().max() > 0.01


def test_merged_weights_have_the_names_of_the_checkpoint(
    tiny_moe_dir: Path, tmp_path: Path
) -> None:
    """As vLLM gets them."""
    adapters = adapters_of(tiny_moe_dir)
    adapters.add("policy", rank=2, alpha=4.0)
    randomise(adapters, "policy", 0)
    adapters.merge("policy", tmp_path)
    sent = checkpoint_weights(adapters.model, adapters.merged("policy"))
    written, before = (
        load_file(folder / "model.safetensors") for folder in (tmp_path, tiny_moe_dir)
    )
    assert sent.keys() == written.keys() == before.keys()
    assert all(torch.equal(sent[key], written[key]) for key in sent)
    assert any(".experts." in key and not torch.equal(sent[key], before[key]) for key in sent)


def test_experts_that_cannot_be_served_are_left_out_with_a_line(
    tiny_moe_dir: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def load(**engine: object) -> LoraAdapters:
        policy = {"model": str(tiny_moe_dir), "device": "cpu", "lora": {"rank": 2}}
        settings = {"policy": policy, "engine": engine}
        (base,) = load_policies(resolve(settings, source="run.toml"))
        assert isinstance(base.adapters, LoraAdapters)
        return base.adapters

    with caplog.at_level(logging.INFO):
        load(kind="embedded")
        load(kind="vllm")
        load(kind="vllm", vllm={"sync": "reload"})
    lines = [line for line in caplog.messages if line.startswith("the adapter")]
    whole = "the adapter 'policy' of rank 2 adapts 8 linear layers and 4 stacks of experts, which "
    assert lines[0] == lines[2] == f"{whole}have 43% of the model's weights"
    assert lines[1].startswith(
        "the adapter 'policy' of rank 2 adapts 8 linear layers, which have 11%"
    )
    assert "not adapted: 4 stacks of experts (adapters on them need the torch learner" in lines[1]
    with pytest.raises(
        PolicyError, match=r"no adapter can be on 'experts' of .* stacks of experts"
    ):
        adapters_of(tiny_moe_dir, experts=False).add("a", rank=2, alpha=4.0, targets=["experts"])
