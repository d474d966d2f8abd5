"""The proof of packing: sound tries are kept in bfloat16, wrong ones are refused in any dtype."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from agentrl.algorithms import proof
from agentrl.algorithms.model.load import load_model
from agentrl.algorithms.model.packing import Pack
from agentrl.core.config import PolicyConfig

BF16 = PolicyConfig(dtype="bfloat16")
Broken = Callable[[Pack], Pack]


def gap_of(network: Any, tokenizer: Any) -> proof.TrieGap:
    gap = proof.trie_gap(network, tokenizer)
    assert gap is not None
    return gap


def round_coarsely(monkeypatch: pytest.MonkeyPatch) -> None:
    """In bfloat16 log-probs of any packing move as those of a pretrained model do, which a tiny one
    is too small for."""
    exact, chance = proof.forward_logprobs, torch.Generator().manual_seed(0)

    def rounded(model: Any, pack: Pack) -> torch.Tensor:
        found = exact(model, pack)
        noise = torch.randn(found.shape, generator=chance)
        return found + 0.1 * noise * (model.dtype == torch.bfloat16)

    monkeypatch.setattr(proof, "forward_logprobs", rounded)


def hidden_token(pack: Pack) -> Pack:
    """A token of the common prompt is hidden from the last answers."""
    end = pack.end.clone()
    end[5] = len(pack.tokens) - 2 * proof.ANSWER_TOKENS
    return replace(pack, end=end)


def moved(pack: Pack) -> Pack:
    """The last answer is a position off."""
    late = torch.arange(len(pack.tokens)) >= len(pack.tokens) - proof.ANSWER_TOKENS
    return replace(pack, positions=pack.positions + late.long())


def break_tries(monkeypatch: pytest.MonkeyPatch, broken: Broken) -> None:
    exact, longest = proof.forward_logprobs, proof.PROMPT_TOKENS + 4 * proof.ANSWER_TOKENS
    row = proof.PROMPT_TOKENS + proof.ANSWER_TOKENS

    def wrong(model: Any, pack: Pack) -> torch.Tensor:
        return exact(model, broken(pack) if row < len(pack.tokens) <= longest else pack)

    monkeypatch.setattr(proof, "forward_logprobs", wrong)


@pytest.mark.parametrize("room", [True, False])
def test_rounding_does_not_refuse_a_sound_trie(
    tiny_model_dir: Path, monkeypatch: pytest.MonkeyPatch, room: bool
) -> None:
    network, tokenizer = load_model(tiny_model_dir, "bfloat16", "cpu")
    round_coarsely(monkeypatch)
    if not room:
        monkeypatch.setattr(proof, "_free", lambda device: 0)
    before = {name: weight.clone() for name, weight in network.named_parameters()}
    gap = gap_of(network, tokenizer)
    assert gap.logprobs > proof.TOLERANCE["bfloat16"]
    assert gap.within(BF16), gap
    assert "times as far from float32 as these" in str(gap)
    for name, weight in network.named_parameters():
        assert weight.dtype == torch.bfloat16
        assert torch.equal(weight, before[name])


@pytest.mark.parametrize("broken", [hidden_token, moved])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_wrong_trie_is_refused(
    tiny_model_dir: Path, monkeypatch: pytest.MonkeyPatch, dtype: str, broken: Broken
) -> None:
    network, tokenizer = load_model(tiny_model_dir, dtype, "cpu")
    policy = PolicyConfig(dtype=dtype)  # type: ignore[arg-type]
    gap = gap_of(network, tokenizer)
    assert gap.within(policy), gap
    break_tries(monkeypatch, broken)
    gap = gap_of(network, tokenizer)
    assert not gap.within(policy), gap


def test_a_gradient_that_is_wrong_or_nan_is_refused(
    tiny_model_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    network, tokenizer = load_model(tiny_model_dir, "bfloat16", "cpu")
    exact = proof.forward_logprobs
    for factor in (1.2, torch.nan):

        def wrong(model: Any, pack: Pack, factor: float = factor) -> torch.Tensor:
            found = exact(model, pack)
            if len(pack.tokens) > proof.PROMPT_TOKENS + 4 * proof.ANSWER_TOKENS:
                return found
            return found.detach() + factor * (found - found.detach())

        monkeypatch.setattr(proof, "forward_logprobs", wrong)
        gap = gap_of(network, tokenizer)
        assert not gap.within(BF16), gap


def test_the_text_is_the_models_own(tiny_model_dir: Path) -> None:
    """Rendered by its template, or plain if it has none."""
    network, tokenizer = load_model(tiny_model_dir, "float32", "cpu")
    for template in (tokenizer.chat_template, "{{ raise_exception('only tools') }}"):
        tokenizer.chat_template = template
        rows = proof._rows(network, tokenizer)
        shown = tokenizer.decode(rows[0].tokens)
        assert "how you found it" in shown
        assert "Both" in shown
        assert len({tuple(row.tokens.tolist()) for row in rows}) == len(rows)
