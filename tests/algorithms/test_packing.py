from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, Gemma2Config, Gemma2ForCausalLM, PreTrainedModel

from agentrl.algorithms import packing
from agentrl.algorithms.batch import Row
from agentrl.algorithms.packing import check_model, forward_logprobs, pack_rows
from agentrl.errors import PolicyError

VOCABULARY = 512


@pytest.fixture(params=["tiny_model_dir", "tiny_llama_dir"])
def model(request: pytest.FixtureRequest) -> PreTrainedModel:
    directory: Path = request.getfixturevalue(request.param)
    return AutoModelForCausalLM.from_pretrained(directory).eval()


def make_rows(lengths: list[int], *, seed: int = 0) -> list[Row]:
    generator = torch.Generator().manual_seed(seed)
    return [make_row(length, generator) for length in lengths]


def make_row(length: int, generator: torch.Generator) -> Row:
    tokens = torch.randint(VOCABULARY, (length,), generator=generator)
    actions = 1 + torch.rand(length - 1, generator=generator).argsort()[: length // 3 + 1].sort()[0]
    return Row(
        tokens=tokens,
        actions=actions,
        logprobs=torch.zeros(len(actions)),
        temperature=0.5 + torch.rand(len(actions), generator=generator),
        transition=torch.zeros(len(actions), dtype=torch.int64),
    )


def gradients(model: PreTrainedModel, loss: Tensor) -> list[Tensor]:
    return list(torch.autograd.grad(loss, list(model.parameters())))


def logprobs_of(model: PreTrainedModel, rows: list[Row]) -> Tensor:
    (pack,) = pack_rows(rows, "trie", 10_000)
    return forward_logprobs(model, pack)[pack.index.argsort()]


def reference(model: PreTrainedModel, row: Row) -> Tensor:
    """What the model itself says, from all its logits."""
    logits = model(input_ids=row.tokens[None], use_cache=False).logits[0]
    before = logits[row.actions - 1].double() / row.temperature.double()[:, None]
    return before.log_softmax(-1).gather(1, row.tokens[row.actions][:, None])[:, 0]


def test_logprobs_and_gradients_are_those_of_the_model_alone(model: PreTrainedModel) -> None:
    rows = make_rows([40, 3, 17, 2, 33])
    expected = torch.cat([reference(model, row) for row in rows])
    logprobs = logprobs_of(model, rows)
    assert logprobs.dtype is torch.float32
    torch.testing.assert_close(logprobs.double(), expected, atol=1e-5, rtol=0)
    weights = torch.linspace(-1, 1, len(logprobs))
    pairs = zip(
        gradients(model, logprobs @ weights),
        gradients(model, expected @ weights.double()),
        strict=True,
    )
    for ours, theirs in pairs:
        torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=1e-5)


def test_a_row_does_not_notice_its_batch_mates(model: PreTrainedModel) -> None:
    row, *others = make_rows([20, 60, 5, 19, 90])
    alone, together = logprobs_of(model, [row]), logprobs_of(model, [row, *others])
    own = slice(0, len(row.actions))
    torch.testing.assert_close(alone, together[own], atol=1e-5, rtol=0)
    for first, second in zip(
        gradients(model, alone.sum()), gradients(model, together[own].sum()), strict=True
    ):
        torch.testing.assert_close(first, second, atol=1e-5, rtol=1e-5)


def test_the_head_sees_action_positions_only_and_in_chunks(
    model: PreTrainedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = make_rows([30, 12, 25])
    whole = logprobs_of(model, rows)
    expected = gradients(model, whole.sum())
    sizes: list[int] = []
    model.get_output_embeddings().register_forward_hook(
        lambda head, inputs, output: sizes.append(output.shape[0])
    )
    monkeypatch.setattr(packing, "MAX_LOGITS", 4 * VOCABULARY)
    chunked = logprobs_of(model, rows)
    assert sum(sizes) == len(whole) == sum(len(row.actions) for row in rows)
    torch.testing.assert_close(whole, chunked)
    for first, second in zip(expected, gradients(model, chunked.sum()), strict=True):
        torch.testing.assert_close(first, second)
    assert max(sizes) == 4
    assert sum(sizes) == 2 * len(whole)  # recomputed in the backward pass instead of kept


def test_float64_models_stay_float64(model: PreTrainedModel) -> None:
    (row,) = make_rows([20])
    logprobs = logprobs_of(model.double(), [row])
    torch.testing.assert_close(logprobs, reference(model, row), atol=1e-12, rtol=0)


def test_a_model_that_transforms_its_logits_is_refused(model: PreTrainedModel) -> None:
    check_model(model)
    config = Gemma2Config(
        vocab_size=32, hidden_size=16, intermediate_size=16, num_hidden_layers=1, head_dim=8,
        num_attention_heads=2, num_key_value_heads=1, final_logit_softcapping=1.0,
    )  # fmt: skip
    with pytest.raises(PolicyError, match="Gemma2ForCausalLM: its logits are not the output"):
        check_model(Gemma2ForCausalLM(config))
