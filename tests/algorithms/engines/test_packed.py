"""Packed weights against the layers' own products, and the engine in bfloat16."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn import Linear, Sequential
from torch.nn.functional import linear

from agentrl.algorithms.engines.embedded import attention
from agentrl.algorithms.model import products
from agentrl.algorithms.model.load import load_model
from agentrl.algorithms.model.products import NarrowLinear
from tests.algorithms.engines.test_engine import Desk, reference

needs_kernels = pytest.mark.skipif(
    not products.has_kernels(), reason="no kernels for bfloat16 on this CPU"
)


def layer(*, bias: bool = False) -> Linear:
    """A layer that has multiplied with its packed weight."""
    torch.manual_seed(0)
    made = Linear(96, 64, bias=bias, dtype=torch.bfloat16)
    products.install(Sequential(made))
    multiplied(made, inputs(3))
    return made


def inputs(rows: int) -> torch.Tensor:
    return torch.randn(1, rows, 96, generator=torch.Generator().manual_seed(rows)).bfloat16()


def multiplied(made: Linear, x: torch.Tensor) -> torch.Tensor:
    with torch.inference_mode():
        return made(x).clone()


def plain(made: Linear, x: torch.Tensor) -> torch.Tensor:
    return linear(x, made.weight, made.bias).detach()


def own(made: Linear) -> NarrowLinear:
    found = vars(made)["forward"]
    assert isinstance(found, NarrowLinear)
    return found


@needs_kernels
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("rows", [1, 2, 7, 64, 300])
def test_a_packed_weight_gives_the_bits_of_the_layer(rows: int, bias: bool) -> None:
    made = layer(bias=bias)
    assert own(made).packed is not None
    assert torch.equal(multiplied(made, inputs(rows)), plain(made, inputs(rows)))


@needs_kernels
def test_a_written_weight_is_packed_again() -> None:
    made, x = layer(), inputs(5)
    before = multiplied(made, x)
    with torch.no_grad():
        made.weight.mul_(2)
    assert torch.equal(multiplied(made, x), plain(made, x))
    assert not torch.equal(multiplied(made, x), before)


@needs_kernels
def test_a_fused_optimizer_needs_forget() -> None:
    made, x = layer(), inputs(5)
    optimizer = torch.optim.AdamW(made.parameters(), lr=0.1, fused=True)
    plain_before = multiplied(made, x)
    made(x).sum().backward()
    optimizer.step()
    products.forget(Sequential(made))
    assert torch.equal(multiplied(made, x), plain(made, x))
    assert not torch.equal(multiplied(made, x), plain_before)


@needs_kernels
def test_gradients_and_copies_are_those_of_an_ordinary_layer() -> None:
    made, x = layer(), inputs(4)
    made(x).sum().backward()
    assert made.weight.grad is not None
    other = copy.deepcopy(made)
    with torch.no_grad():
        other.weight.zero_()
    assert multiplied(other, x).abs().max() == 0
    assert multiplied(made, x).abs().max() > 0
    assert own(other).layer is other


def test_layers_in_float32_stay_as_they_are() -> None:
    made = Linear(8, 8)
    products.install(Sequential(made))
    assert "forward" not in vars(made)


# -- the engine ------------------------------------------------------------------------------------


@pytest.fixture
def desk(tiny_model_dir: Path) -> Iterator[Callable[..., Desk]]:
    desks = []

    def make(**settings: Any) -> Desk:
        model = load_model(tiny_model_dir, "bfloat16", "cpu")[0]
        desks.append(Desk(model, **settings))
        return desks[-1]

    yield make
    for each in desks:
        each.engine.close()


def test_in_bfloat16_batch_mates_change_no_bit(desk: Callable[..., Desk]) -> None:
    alone, crowd = desk(), desk()
    dice = np.random.default_rng(1)
    prompts = [dice.integers(3, 400, dice.integers(2, 120)).tolist() for _ in range(12)]
    calls = [crowd.submit(prompt, seed=seed, max_tokens=20) for seed, prompt in enumerate(prompts)]
    for seed, (prompt, call) in enumerate(zip(prompts, calls, strict=True)):
        one, many = alone.run(prompt, seed=seed, max_tokens=20), crowd.result(call)
        assert one.tokens == many.tokens
        assert one.logprobs == many.logprobs


def test_in_bfloat16_log_probs_are_those_of_a_forward_pass(desk: Callable[..., Desk]) -> None:
    here, dice = desk(), np.random.default_rng(0)
    for seed in range(6):
        prompt = dice.integers(3, 400, 40 * seed + 5).tolist()
        update = here.run(prompt, seed=seed, max_tokens=20)
        expected = reference(here.model, prompt, update, 1.0)
        np.testing.assert_allclose(update.logprobs, expected, atol=0.1)


def test_in_bfloat16_a_step_reads_few_keys_too_many(desk: Callable[..., Desk]) -> None:
    here, contexts = desk(), {}

    def note(module: Any, args: Any, kwargs: Any) -> None:
        if kwargs.get("plan") is not None:
            contexts[int(kwargs["plan"].last.max()) + 1] = kwargs["plan"].context

    here.model.register_forward_pre_hook(note, with_kwargs=True)
    here.run(list(range(3, 60)), max_tokens=100)
    assert [contexts[size] for size in (58, 64, 65, 128, 129, 156)] == [64, 64, 128, 128, 256, 256]
    here.run([7, 8, 9], max_tokens=80)  # of the 256 that are there now
    assert [contexts[size] for size in (4, 64, 65, 80)] == [64, 64, 256, 256]


def test_only_a_cpu_reads_more_keys_to_save_a_copy() -> None:
    at = {"context": 65, "capacity": 256}
    assert attention.keys_read(**at, dtype=torch.bfloat16, device="cpu") == 256
    assert attention.keys_read(**at, dtype=torch.bfloat16, device="cuda") == 128
    assert attention.keys_read(65, 512, torch.float32, "cpu") == 256


def test_in_bfloat16_keys_survive_growth(desk: Callable[..., Desk]) -> None:
    here, dice = desk(max_batch=4), np.random.default_rng(0)
    short = [dice.integers(3, 400, 20).tolist() for _ in range(3)]
    ended = [here.run(prompt, seed=1, max_tokens=4).tokens for prompt in short]
    here.run(dice.integers(3, 400, 200).tolist(), max_tokens=20)
    fed = here.fed
    for prompt, tokens in zip(short, ended, strict=True):  # their keys are cached
        longer = [*prompt, *tokens, 5]
        update = here.run(longer, seed=2, max_tokens=10)
        expected = reference(here.model, longer, update, 1.0)
        np.testing.assert_allclose(update.logprobs, expected, atol=0.1)
    assert here.fed - fed < 3 * 20


def test_new_weights_are_answered_with(desk: Callable[..., Desk]) -> None:
    here, prompt = desk(), [5, 6, 7, 8]
    before = here.run(prompt, temperature=0.0, max_tokens=8)

    def load() -> None:  # as a fused optimizer does, which does not count up versions
        for parameter in here.model.parameters():
            parameter.data.neg_()

    here.engine.swap(0, 1, load).result()
    after = here.run(prompt, temperature=0.0, max_tokens=8)
    expected = reference(here.model, prompt, after, 0.0)
    np.testing.assert_allclose(after.logprobs, expected, atol=0.1)
    assert after.tokens != before.tokens
