"""The proof at load: which way to compute a model gives its own log-probs."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers
from packaging.version import Version
from torch import Tensor
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    Phi3Config,
    Phi3ForCausalLM,
    PreTrainedModel,
)
from transformers.models.llama.modeling_llama import LlamaAttention

from agentrl.algorithms.data.batch import TokenRow
from agentrl.algorithms.engines.embedded.engine import PlainForward
from agentrl.algorithms.engines.embedded.proof import (
    ANSWER,
    prove_engine,
    sampling_gap,
    served_context,
)
from agentrl.algorithms.model import attention, forward
from agentrl.algorithms.model.attention import context_length
from agentrl.algorithms.model.forward import (
    check_model,
    forward_logprobs,
    gap_between,
    own_results,
    proof_rows,
    prove,
    results,
)
from agentrl.algorithms.model.packing import pack_rows
from agentrl.algorithms.model.scaled import (
    VOCABULARY,
    randomise,
    scaled_config,
    scaled_copy,
    soften,
)
from agentrl.core.errors import PolicyError

SHAPE: dict[str, Any] = {
    "vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "pad_token_id": 0, "eos_token_id": 1,
    "bos_token_id": 2,
}  # fmt: skip


def network(kind: str, **settings: Any) -> PreTrainedModel:
    """A small copy of a class, whose windows are those of the whole model in small."""
    torch.manual_seed(3)
    shape = scaled_config(AutoConfig.for_model(kind, **settings))
    model = AutoModelForCausalLM.from_config(shape, dtype=torch.float32).eval()
    randomise(model)
    soften(model)
    return model


@pytest.mark.parametrize(
    ("kind", "settings", "way", "packing"),
    [
        ("llama", {}, "packed", "trie"),
        ("qwen2", {"use_sliding_window": True, "max_window_layers": 1}, "packed", "trie"),
        ("afmoe", {}, "packed", "trie"),  # takes a view of what attention returns
        ("jetmoe", {}, "packed", "trie"),
        ("llama4_text", {}, "padded", "rows"),  # is its own base model
        ("phimoe", {"sliding_window": 2048}, "padded", "rows"),  # its window is in the mask alone
        ("gpt_oss", {}, "padded", "rows"),
    ],
)
def test_the_way_that_is_chosen_gives_the_models_own_values(
    kind: str, settings: dict[str, Any], way: str, packing: str
) -> None:
    model = network(kind, **settings)
    rows = proof_rows()
    exact = own_results(model, rows)
    proof = prove(model)
    assert (proof.way, proof.packing) == (way, packing)
    gap = gap_between(results(model, rows, proof.packing, proof.way), exact)
    assert gap.logprobs < 1e-4
    assert gap.gradients < 1e-5


@pytest.mark.parametrize("switch", [torch.no_grad, torch.inference_mode])
def test_gradients_are_compared_where_they_are_switched_off(
    monkeypatch: pytest.MonkeyPatch, switch: Any
) -> None:
    """As by a server that scores text before the first step."""
    monkeypatch.setattr(forward, "_proofs", {})
    model = network("llama")
    with switch():
        proof = prove(model)
    assert (proof.way, proof.packing) == ("packed", "trie")


def test_a_window_that_only_the_mask_knows_is_found() -> None:
    model = network("phimoe", sliding_window=2048)
    rows = proof_rows()
    exact = own_results(model, rows)
    assert gap_between(results(model, rows, "rows", "packed"), exact).logprobs > 0.1
    assert "if rows are packed" in prove(model).reason


def test_layers_that_drop_the_plan_of_a_pack_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """As Nemotron's of transformers 5.24, which call attention without further arguments."""

    def dropped(layer: Any, *given: Any, plan: object = None, **known: Any) -> Any:
        return attend(layer, *given, **known)

    attend = LlamaAttention.forward
    monkeypatch.setattr(LlamaAttention, "forward", dropped)
    model, rows = network("llama", rms_norm_eps=1.1e-6), proof_rows()
    proof = prove(model)
    assert (proof.way, proof.packing) == ("padded", "rows")
    exact = own_results(model, rows)
    assert gap_between(results(model, rows, proof.packing, proof.way), exact).logprobs < 1e-4
    assert prove_engine(model)[0] == "cached"


@pytest.mark.parametrize("kind", ["doge", "glm_moe_dsa"])
def test_a_model_that_reads_beyond_its_index_is_refused(kind: str) -> None:
    with pytest.raises(PolicyError, match="depend on the tokens after it"):
        check_model(network(kind))


def test_a_model_that_reads_ahead_in_short_rows_is_refused() -> None:
    """Doge has no causal mask within its window, and in longer rows none that a test would see."""
    shape = AutoConfig.for_model(
        "doge", **SHAPE | {"head_dim": 8}, keep_window_size=2048, num_experts=4,
    )  # fmt: skip
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(shape, dtype=torch.float32).eval()
    randomise(model)
    with pytest.raises(PolicyError, match="depend on the tokens after it"):
        check_model(model)


@pytest.mark.skipif(
    not Version("5.10") <= Version(transformers.__version__) < Version(forward.COMPUTES_CHUNKS),
    reason="transformers has no such classes, or computes them rightly",
)
@pytest.mark.parametrize("kind", ["nemotron_h", "zamba2"])
def test_state_space_layers_that_read_ahead_are_refused(kind: str) -> None:
    with pytest.raises(
        PolicyError, match=r"without the kernels of mamba_ssm.*install transformers"
    ):
        check_model(network(kind))


def test_a_model_without_a_small_copy_is_run_as_it_is(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def fail(*given: object) -> Any:
        raise ValueError("no such number")

    monkeypatch.setattr(forward, "_proofs", {})
    monkeypatch.setattr("agentrl.algorithms.model.scaled.scaled_config", fail)
    shape = SHAPE | {"vocab_size": 21}  # less than that of the rows
    model = LlamaForCausalLM(LlamaConfig(**shape)).eval()
    assert prove(model).way == "plain"
    assert forward.supported_packing(model, "trie") == "rows"
    (record,) = caplog.records
    assert "no small copy" in record.message
    assert "no such number" in record.message
    assert "one at a time" in record.message


def test_a_model_without_a_small_copy_must_be_trainable_itself(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A random one, one whose forward pass fails, and one that reads the future."""

    def none(model: PreTrainedModel) -> PreTrainedModel:
        raise forward.ScalingError("unknown")

    monkeypatch.setattr(forward, "scaled_copy", none)
    for index, (change, sentence) in enumerate(
        {
            "random": "gives other log-probs each time",
            "fails": r"over 41 tokens fails \(ValueError: too long\)",
            "ahead": "depend on the tokens after it",
        }.items()
    ):
        model = network("llama", **SHAPE, rms_norm_eps=1e-6 * (index + 2))

        def changed(
            module: Any, args: Any, output: torch.Tensor, change: str = change
        ) -> torch.Tensor:
            if change == "fails":
                raise ValueError("too long")
            return output + (torch.rand(()) if change == "random" else output.mean(1, True))

        model.get_input_embeddings().register_forward_hook(changed)
        with pytest.raises(PolicyError, match=sentence):
            prove(model)


def test_a_projection_before_the_head_is_refused() -> None:
    shape = AutoConfig.for_model(
        "rembert", vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=2,
        num_attention_heads=4, input_embedding_size=16, output_embedding_size=16, is_decoder=True,
    )  # fmt: skip
    with pytest.raises(PolicyError, match="layers come before it"):
        check_model(AutoModelForCausalLM.from_config(shape, dtype=torch.float32).eval())


def test_no_argument_that_changes_scores_is_dropped() -> None:
    layer, plan = torch.nn.Module(), attention.TreePlan(torch.tensor([1]), torch.tensor([0]))
    one = torch.zeros(1, 1, 1, 16)
    with pytest.raises(PolicyError, match="'softcap'"):
        attention.attention(layer, one, one, one, None, plan=plan, softcap=5.0)
    with pytest.raises(PolicyError, match="masks of their own"):
        attention.attention(layer, one, one, one, torch.zeros(1, 1, 1, 9), plan=plan)


def test_a_copy_leaves_the_state_of_random_numbers() -> None:
    model = LlamaForCausalLM(LlamaConfig(**SHAPE))
    before = torch.get_rng_state()
    scaled_copy(model)
    assert torch.equal(torch.get_rng_state(), before)


# -- long contexts ---------------------------------------------------------------------------------

FACTORS = {"short_factor": [1.0, 1.1, 1.2, 1.3], "long_factor": [1.0, 2.0, 4.0, 8.0]}
ROPES: dict[str, dict[str, Any]] = {
    "default": {},
    "linear": {"factor": 4.0},
    "dynamic": {"factor": 4.0},
    "yarn": {"factor": 4.0, "original_max_position_embeddings": 16},
    "llama3": {
        "factor": 4.0, "original_max_position_embeddings": 16,
        "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    },
    "longrope": {"original_max_position_embeddings": 16, **FACTORS},
}  # fmt: skip


def rotated(kind: str, most: int = 64) -> PreTrainedModel:
    torch.manual_seed(0)
    rope = {"rope_type": kind, "rope_theta": 1e4, **ROPES[kind]}
    if kind == "longrope":
        old = {"original_max_position_embeddings": 16}  # at the top, as Phi's configurations
        phi = Phi3Config(**SHAPE, **old, max_position_embeddings=most, rope_parameters=rope)
        model: PreTrainedModel = Phi3ForCausalLM(phi)
    else:
        config = LlamaConfig(**SHAPE, max_position_embeddings=most, rope_parameters=rope)
        model = LlamaForCausalLM(config)
    randomise(model)
    return model.eval()


def row(size: int, seed: int) -> TokenRow:
    draw = torch.Generator().manual_seed(seed)
    actions = torch.arange(2, size)
    ones = torch.ones(len(actions))
    tokens = torch.randint(3, VOCABULARY, (size,), generator=draw)
    return TokenRow(tokens, actions, ones, ones, torch.zeros_like(actions))


@pytest.mark.parametrize("kind", ROPES)
def test_the_values_of_a_row_do_not_depend_on_the_other_rows(kind: str) -> None:
    """On both sides of the context before positions were extended."""
    model, rows = rotated(kind), [row(size, size) for size in (8, 17, 18, 30, 12)]
    exact, _ = own_results(model, rows)
    for packing in ("rows", "trie"):
        found = torch.zeros(len(exact))
        for pack in pack_rows(rows, packing, 1000):
            found[pack.index] = forward_logprobs(model, pack).detach()
        torch.testing.assert_close(found, exact, atol=1e-4, rtol=0)


@pytest.mark.parametrize(
    ("rope", "most", "expected"),
    [
        ({"rope_type": "default"}, 32, 32),
        ({"rope_type": "yarn", "factor": 4.0}, 32, 128),
        ({"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}, 32, 128),
        ({"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}, 128, 128),
        ({"rope_type": "dynamic", "factor": 4.0}, 32, 32),
    ],
)
def test_the_context_follows_the_factor(rope: dict[str, Any], most: int, expected: int) -> None:
    config = LlamaConfig(**SHAPE, max_position_embeddings=most, rope_parameters=rope)
    assert context_length(LlamaForCausalLM(config)) == expected


def test_a_yarn_row_beyond_the_original_context_is_computed() -> None:
    rope = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}
    config = LlamaConfig(**SHAPE, max_position_embeddings=16, rope_parameters=rope)
    model = LlamaForCausalLM(config).eval()
    exact, _ = own_results(model, [row(40, 1)])
    (pack,) = pack_rows([row(40, 1)], "trie", 100)
    torch.testing.assert_close(forward_logprobs(model, pack).detach(), exact, atol=1e-4, rtol=0)


# -- the engine ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "settings", "way"),
    [
        ("llama", {}, "batched"),
        ("phimoe", {"sliding_window": 2048}, "cached"),
        ("gpt_oss", {}, "cached"),
        ("mamba", {}, "cached"),
        ("rwkv", {}, "cached"),
        ("llama4_text", {}, "cached"),
        ("bamba", {}, "whole"),
    ],
)
def test_the_engine_samples_with_the_models_own_logprobs(
    kind: str, settings: dict[str, Any], way: str
) -> None:
    model = network(kind, **settings)
    found, _ = prove_engine(model)
    assert found == way
    gap, answered = sampling_gap(model, found)
    assert answered
    assert gap < 1e-4


@pytest.mark.parametrize("kind", ["llama", "mamba", "rwkv"])
def test_a_call_with_a_cache_reads_every_token_once(kind: str) -> None:
    model, sizes = network(kind), list[int]()
    model.register_forward_pre_hook(
        lambda _, __, given: sizes.append(given["input_ids"].shape[1]), with_kwargs=True
    )
    sampling_gap(model, "cached")
    assert sizes[1:ANSWER] == [1] * (ANSWER - 1)  # of the first call, which runs alone


def test_a_model_without_a_cache_is_sampled_without() -> None:
    class Whole(torch.nn.Module):
        def forward(self, input_ids: Tensor, use_cache: bool = False) -> None: ...

    assert not PlainForward(Whole(), cached=False).cached
    with pytest.raises(PolicyError, match="takes no cache"):
        PlainForward(Whole(), cached=True)


def test_longrope_is_served_up_to_where_its_rotations_change() -> None:
    model = rotated("longrope")
    assert served_context(model, 40) == 16
    assert served_context(model, 12) == 12
    assert served_context(rotated("yarn"), 40) == 40
