from __future__ import annotations

import logging
import random
from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    Gemma2Config,
    Gemma2ForCausalLM,
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from agentrl.algorithms.data.batch import TokenRow
from agentrl.algorithms.data.merge import merge
from agentrl.algorithms.model.forward import (
    check_model,
    forward_logprobs,
    hidden_states,
    supported_packing,
    whole_blocks,
)
from agentrl.algorithms.model.packing import Packing, pack_rows
from agentrl.core.errors import PolicyError
from agentrl.core.types import Sampling, Transition
from tests import factories

VOCABULARY = 32
SHAPE: dict[str, int] = {
    "vocab_size": VOCABULARY, "hidden_size": 24, "intermediate_size": 32, "head_dim": 8,
    "num_hidden_layers": 2, "num_attention_heads": 6, "num_key_value_heads": 2,
}  # fmt: skip
ALTERNATE = ["full_attention", "sliding_attention"]
MODELS: dict[str, Callable[[], PreTrainedModel]] = {
    "qwen2": lambda: Qwen2ForCausalLM(Qwen2Config(**SHAPE, tie_word_embeddings=True)),
    "qwen2, window": lambda: Qwen2ForCausalLM(
        Qwen2Config(**SHAPE, use_sliding_window=True, sliding_window=4, layer_types=ALTERNATE)
    ),
    "qwen3": lambda: Qwen3ForCausalLM(Qwen3Config(**SHAPE)),
    "llama": lambda: LlamaForCausalLM(LlamaConfig(**SHAPE, tie_word_embeddings=False)),
    "mistral, window": lambda: MistralForCausalLM(MistralConfig(**SHAPE, sliding_window=5)),
    "gemma3, window": lambda: Gemma3ForCausalLM(
        Gemma3TextConfig(**SHAPE, sliding_window=3, layer_types=ALTERNATE, pad_token_id=0)
    ),
}
# Their norms compute in float32 whatever the model is; these have one that does not.
DOUBLE = ["qwen2", "qwen2, window", "llama", "mistral, window"]
UNUSABLE: dict[str, Callable[[], PreTrainedModel]] = {
    "dynamic positions": lambda: LlamaForCausalLM(
        LlamaConfig(**SHAPE, rope_parameters={"rope_type": "dynamic", "factor": 2.0})
    ),
    "capped scores": lambda: Gemma2ForCausalLM(
        Gemma2Config(**SHAPE, final_logit_softcapping=None, pad_token_id=0)
    ),
}


@cache
def model_of(name: str, dtype: torch.dtype = torch.float32) -> PreTrainedModel:
    torch.manual_seed(0)
    model = (MODELS | UNUSABLE)[name]()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(std=0.3)  # so that attention is far from uniform
    if dtype is torch.float64:
        for module in list(model.modules()):
            for child_name, child in module.named_children():
                if type(child).__name__.endswith("RMSNorm"):
                    norm = torch.nn.RMSNorm(child.weight.shape, eps=child.variance_epsilon)
                    norm.weight = child.weight
                    setattr(module, child_name, norm)
    return model.to(dtype).eval()


# -- agents' calls, from a seed --------------------------------------------------------------------


def calls_of(seed: int, calls: int, longest: int = 8) -> list[Transition]:
    """Calls of one rollout: each continues an earlier call, samples its prompt again, forgets some
    of its past or starts anew."""
    dice = random.Random(seed)

    def some(least: int) -> list[int]:
        return [dice.randrange(VOCABULARY) for _ in range(dice.randint(least, longest))]

    known = [[1, 2, 3]]
    made = []
    for _ in range(calls):
        prompt = dice.choice(known)
        prompt = [*prompt[: dice.randint(1, len(prompt))], *some(0)]
        completion = some(1)
        known += [prompt, [*prompt, *completion]]
        made.append(
            factories.call(
                "",
                prompt,
                completion,
                attempt="",
                logprob=0.0,
                sampling=Sampling(temperature=dice.choice([0.5, 1.0, 1.5])),
            )
        )
    return made


@st.composite
def groups(draw: st.DrawFn) -> list[list[Transition]]:
    """Rollouts of one group: they start alike, and two may say the same."""
    seeds = st.integers(0, 10**6)
    rollouts = draw(st.lists(st.tuples(seeds, st.integers(1, 6)), min_size=1, max_size=4))
    return [calls_of(seed, calls) for seed, calls in draw(st.permutations(rollouts * 2))]


def rows_of(group: list[list[Transition]]) -> list[TokenRow]:
    return [row for calls in group for row in merge(calls)]


def per_call(model: PreTrainedModel, group: list[list[Transition]]) -> Tensor:
    """Log-probs in the order of the rows' actions, each from all logits of its call alone."""
    parts = []
    for calls in group:
        alone = []
        for call in calls:
            tokens = torch.tensor([*call.prompt, *call.completion])
            logits = model(input_ids=tokens[None], use_cache=False).logits[
                0, len(call.prompt) - 1 :
            ]
            scaled = (logits[:-1] / call.sampling.temperature).log_softmax(-1)
            alone.append(scaled.gather(1, tokens[len(call.prompt) :, None])[:, 0])
        for row in merge(calls):
            taken = dict.fromkeys(row.transition.tolist())
            parts += [alone[index] for index in taken]
    return torch.cat(parts)


def packed(
    model: PreTrainedModel, rows: list[TokenRow], how: Packing, budget: int = 10_000
) -> Tensor:
    """Log-probs in token order, whatever the packs."""
    packs = pack_rows(rows, how, budget)
    logprobs = torch.cat([forward_logprobs(model, pack) for pack in packs])
    return logprobs[torch.cat([pack.index for pack in packs]).argsort()]


def gradients(model: PreTrainedModel, logprobs: Tensor) -> list[Tensor]:
    weight = torch.linspace(-1, 1.5, len(logprobs), dtype=logprobs.dtype)
    return list(torch.autograd.grad(logprobs @ weight, list(model.parameters())))


def assert_same(ours: list[Tensor], theirs: list[Tensor], error: float) -> None:
    """Every gradient within `error` of its own norm, or of the average one's where it should be
    zero (biases of keys)."""
    floor = float(torch.stack([each.norm() for each in theirs]).mean()) * 1e-2
    for a, b in zip(ours, theirs, strict=True):
        assert (a - b).norm() <= error * max(float(b.norm()), floor)


def check_exact(
    model: PreTrainedModel,
    group: list[list[Transition]],
    budget: int,
    error: float,
    hows: tuple[Packing, ...] = ("rows", "trie"),
) -> None:
    rows, expected = rows_of(group), per_call(model, group)
    theirs = gradients(model, expected)
    for how in hows:
        logprobs = packed(model, rows, how, budget)
        assert logprobs.dtype is expected.dtype
        torch.testing.assert_close(logprobs, expected.detach(), atol=error, rtol=error)
        assert_same(gradients(model, logprobs), theirs, error)


# -- exactness -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.slow] * (name in DOUBLE)) for name in MODELS]
)
@given(group=groups(), budget=st.sampled_from([1, 20, 60, 10_000]))
@settings(deadline=None, max_examples=8)
def test_every_gradient_is_that_of_per_call_training(
    name: str, group: list[list[Transition]], budget: int
) -> None:
    check_exact(model_of(name), group, budget, 1e-5)


@pytest.mark.parametrize("name", DOUBLE)
@given(group=groups(), budget=st.sampled_from([1, 20, 60, 10_000]))
@settings(deadline=None, max_examples=8)
def test_in_double_precision_to_ten_digits(
    name: str, group: list[list[Transition]], budget: int
) -> None:
    check_exact(model_of(name, torch.float64), group, budget, 1e-10)


@pytest.mark.parametrize("name", ["qwen2", "mistral, window"])
def test_long_branches_too(name: str) -> None:
    # Longer than a block of tree attention, and than the window.
    group = [calls_of(1, 6, longest=150)] * 2
    check_exact(model_of(name, torch.float64), group, 900, 1e-10, ("trie",))


@pytest.mark.parametrize("name", UNUSABLE)
def test_without_tree_attention_branches_are_computed_alone(name: str) -> None:
    check_exact(model_of(name), [calls_of(s, 5) for s in (1, 1, 2)], 40, 1e-5)


def test_the_order_of_rows_and_their_batch_mates_do_not_matter() -> None:
    model, rows = model_of("llama", torch.float64), rows_of([calls_of(s, 4) for s in range(4)])
    one, *_ = alone = torch.split(packed(model, rows, "trie"), [len(r.actions) for r in rows])
    torch.testing.assert_close(packed(model, rows[:1], "rows"), one, atol=1e-12, rtol=0)
    backwards = torch.split(
        packed(model, rows[::-1], "trie"), [len(r.actions) for r in rows[::-1]]
    )[::-1]
    torch.testing.assert_close(torch.cat(backwards), torch.cat(alone), atol=1e-12, rtol=0)


def test_recomputing_activations_changes_nothing() -> None:
    model, rows = MODELS["qwen2, window"]().train(), rows_of([calls_of(s, 4) for s in range(3)])
    expected = gradients(model, packed(model, rows, "trie"))
    for reentrant in (False, True):
        settings = {"use_reentrant": reentrant}
        if hasattr(model, "activation_checkpointing_enable"):  # its name since transformers 5.23
            model.activation_checkpointing_enable(settings)
        else:
            model.gradient_checkpointing_enable(settings)
        model.enable_input_require_grads()
        logprobs = packed(model, rows, "trie")
        model.zero_grad()
        weight = torch.linspace(-1, 1.5, len(logprobs))
        torch.autograd.backward(logprobs @ weight)
        found = [parameter.grad for parameter in model.parameters()]
        assert_same([g for g in found if g is not None], expected, 1e-6)


# -- what is forwarded -----------------------------------------------------------------------------


def distinct(rows: list[TokenRow]) -> int:
    """(prefix, token) pairs that an action has before it."""
    return len(
        {tuple(row.tokens[:n].tolist()) for row in rows for n in range(1, 1 + int(row.actions[-1]))}
    )


@given(groups())
@settings(deadline=None, max_examples=50)
def test_a_trie_forwards_every_distinct_token_once(group: list[list[Transition]]) -> None:
    rows = rows_of(group)
    (pack,) = pack_rows(rows, "trie", 10_000)
    assert len(pack.tokens) == distinct(rows)
    assert len(pack.actions) == sum(len(row.actions) for row in rows)


@given(groups(), st.integers(1, 400), st.sampled_from(["rows", "trie"]), st.booleans())
@settings(deadline=None, max_examples=80)
def test_packs_hold_every_action_once_under_the_budget(
    group: list[list[Transition]], budget: int, how: Packing, small: bool
) -> None:
    rows = rows_of(group)
    packs = pack_rows(rows, how, budget, small=small)
    index = torch.cat([pack.index for pack in packs])
    assert index.sort().values.tolist() == list(range(sum(len(row.actions) for row in rows)))
    owner = torch.cat([torch.full_like(row.actions, i) for i, row in enumerate(rows)])
    for pack in packs:
        assert len(pack.tokens) <= budget or len(owner[pack.index].unique()) == 1
    whole = torch.cat([row.tokens[row.actions] for row in rows])
    temperature = torch.cat([row.temperature for row in rows])
    for pack in packs:
        assert torch.equal(pack.actions, whole[pack.index])
        assert torch.equal(pack.temperature, temperature[pack.index])


def row(tokens: list[int], actions: list[int]) -> TokenRow:
    ones = torch.ones(len(actions))
    return TokenRow(torch.tensor(tokens), torch.tensor(actions), -ones, ones, ones.long())


def test_nothing_after_the_last_action_is_forwarded() -> None:
    (pack,) = pack_rows([row([5, 6, 7, 8, 9], [1, 3])], "rows", 100)
    assert pack.tokens.tolist() == [5, 6, 7]
    assert pack.states.tolist() == [0, 2]
    assert pack.actions.tolist() == [6, 8]


def test_an_action_of_two_rollouts_is_one_token_trained_twice() -> None:
    rows = [row([1, 2, 3, 4], [1, 3]), row([1, 2, 3, 5], [1, 3])]
    (pack,) = pack_rows(rows, "trie", 100)
    assert pack.tokens.tolist() == [1, 2, 3]
    assert pack.states.tolist() == [0, 2, 0, 2]
    assert pack.index.tolist() == [0, 1, 2, 3]


def test_a_row_longer_than_the_budget_goes_alone_and_whole() -> None:
    packs = pack_rows([row([1] * 9, [8]), row([2] * 3, [2]), row([3] * 3, [2])], "trie", 4)
    assert [pack.tokens.tolist() for pack in packs] == [[1] * 8, [2, 2, 3, 3]]


def test_small_packs_end_between_prompts() -> None:
    """Six prompts of 90 tokens with four answers of 30 each: a pack of one prompt and its answers
    computes no token twice; a budget of 2000 would have one pack."""
    rows = [
        row([*range(100 * prompt, 100 * prompt + 90), *[7 + answer] * 30], [90, 119])
        for prompt in range(6)
        for answer in range(4)
    ]
    sizes = [len(pack.tokens) for pack in pack_rows(rows, "trie", 2000, small=True)]
    assert sizes == [90 + 4 * 29] * 6
    assert len(pack_rows(rows, "trie", 2000)) == 1


def test_small_packs_of_one_prompt_are_not_worth_computing_it_again() -> None:
    rows = [row([*range(900), *[7 + answer] * 30], [900, 929]) for answer in range(8)]
    (pack,) = pack_rows(rows, "trie", 4000, small=True)
    assert len(pack.tokens) == 900 + 8 * 29
    assert len(pack_rows(rows, "trie", 1000, small=True)) == 3  # as the budget demands


def test_no_rows_are_no_packs() -> None:
    assert pack_rows([], "trie", 10) == pack_rows([], "rows", 10) == []
    assert pack_rows([], "trie", 1000, small=True) == []


# -- models ----------------------------------------------------------------------------------------


def test_a_model_that_is_trained_still_does_everything_else() -> None:
    model = MODELS["qwen2, window"]().eval()
    tokens, mask = torch.tensor([[1, 2, 3, 4], [5, 6, 7, 8]]), torch.tensor([[1] * 4, [0, 1, 1, 1]])
    before = model(input_ids=tokens, attention_mask=mask).logits
    packed(model, rows_of([calls_of(0, 3)]), "trie")
    assert torch.equal(model(input_ids=tokens, attention_mask=mask).logits, before)


def test_the_way_a_model_is_computed_is_said_once(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "agentrl")
    assert supported_packing(model_of("llama"), "trie") == "trie"
    (record,) = caplog.records
    assert "'llama' is trained in packs (trie): a small copy differs" in record.message
    caplog.clear()
    capped = model_of("capped scores")
    assert supported_packing(capped, "trie") == supported_packing(capped, "rows") == "rows"
    said, _ = caplog.records
    assert "packing = 'trie': model type 'gemma2' caps its" in said.message
    assert said.levelno == logging.WARNING


def test_states_are_those_before_each_action() -> None:
    model = model_of("qwen3")
    (pack,) = pack_rows([row([5, 6, 7, 8, 9], [1, 3])], "trie", 100)
    hidden = model.base_model(input_ids=torch.tensor([[5, 6, 7]])).last_hidden_state[0, [0, 2]]
    torch.testing.assert_close(hidden_states(model, pack), hidden, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("name", ["qwen2", "mistral, window"])
def test_whole_blocks_change_no_state(name: str) -> None:
    rows = [row([5, 6, 7, 8, 9], [1, 3]), row([5, 6, 4, 3], [2, 3]), row([1, 2, 3], [1])]
    (pack,) = pack_rows(rows, "trie", 100)
    whole = whole_blocks(pack)
    assert (len(whole.tokens), len(whole.positions), len(whole.end)) == (128, 128, 128)
    assert whole_blocks(whole).tokens.shape == whole.tokens.shape
    model = model_of(name)
    expected = hidden_states(model, pack)
    torch.testing.assert_close(hidden_states(model, whole), expected, atol=1e-5, rtol=1e-5)


def test_a_row_longer_than_the_context_is_refused() -> None:
    model = LlamaForCausalLM(LlamaConfig(**SHAPE, max_position_embeddings=6))
    forward_logprobs(model, pack_rows([row([1] * 7, [6])], "trie", 100)[0])
    with pytest.raises(PolicyError, match=r"row of 7 tokens .* 6 tokens: serve it with that"):
        forward_logprobs(model, pack_rows([row([1] * 8, [7])], "trie", 100)[0])


def test_a_model_that_transforms_its_logits_is_refused(tiny_model_dir: Path) -> None:
    check_model(AutoModelForCausalLM.from_pretrained(tiny_model_dir))
    config = Gemma2Config(**SHAPE, final_logit_softcapping=1.0, pad_token_id=0)
    with pytest.raises(PolicyError, match="Gemma2ForCausalLM: its logits are not the output"):
        check_model(Gemma2ForCausalLM(config))
