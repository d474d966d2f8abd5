from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from agentrl.algorithms.model import lm_head, products
from agentrl.algorithms.model.lm_head import action_logprobs

N, HIDDEN, VOCABULARY = 11, 6, 40


@pytest.fixture(autouse=True)
def four_rows_a_chunk(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lm_head, "MAX_LOGITS", 4 * VOCABULARY)
    monkeypatch.setattr(products, "BLOCK", 4 * HIDDEN)


def make_inputs(dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor, Tensor]:
    draw = torch.Generator().manual_seed(0)
    hidden = torch.randn(N, HIDDEN, generator=draw, dtype=dtype).requires_grad_()
    tokens = torch.randint(VOCABULARY, (N,), generator=draw)
    return hidden, tokens, 0.5 + torch.rand(N, generator=draw)


def make_head(*, bias: bool = False, dtype: torch.dtype = torch.float64) -> nn.Linear:
    torch.manual_seed(1)
    return nn.Linear(HIDDEN, VOCABULARY, bias=bias, dtype=dtype)


def wrapped() -> nn.Module:
    """A head with an adapter that has moved away from zero."""
    model = nn.Sequential()
    model.add_module("head", make_head())
    made = get_peft_model(model, LoraConfig(r=2, target_modules=["head"], init_lora_weights=False))
    return made.base_model.model.head.double()


def naive(
    module: nn.Module, hidden: Tensor, tokens: Tensor, temperature: Tensor
) -> tuple[Tensor, Tensor]:
    logprobs = (module(hidden) / temperature.to(hidden)[:, None]).log_softmax(-1)
    entropy = -(logprobs.exp() * logprobs).sum(-1)
    return logprobs.gather(1, tokens[:, None])[:, 0], entropy


HEADS: dict[str, Callable[[], nn.Module]] = {
    "plain": make_head,
    "bias": lambda: make_head(bias=True),
    "adapter": wrapped,
}


@pytest.mark.parametrize("name", HEADS)
def test_values_and_gradients_are_those_of_all_logits(name: str) -> None:
    module, (hidden, tokens, temperature) = HEADS[name](), make_inputs()
    learned = [hidden, *(each for each in module.parameters() if each.requires_grad)]
    ours, entropy = action_logprobs(module, hidden, tokens, temperature)
    theirs, expected = naive(module, hidden, tokens, temperature)
    assert not entropy.requires_grad
    entropy = action_logprobs(module, hidden, tokens, temperature, learn_entropy=True)[1]
    torch.testing.assert_close(ours, theirs, atol=1e-12, rtol=0)
    torch.testing.assert_close(entropy, expected.detach(), atol=1e-12, rtol=0)
    weights = torch.linspace(-1, 1, N, dtype=torch.float64)
    both = action_logprobs(module, hidden, tokens, temperature, learn_entropy=True)
    for loss, naive_loss in (
        (ours @ weights, theirs @ weights),
        (entropy @ weights.exp(), expected @ weights.exp()),
        (both[0] @ weights + both[1] @ weights.exp(), theirs @ weights + expected @ weights.exp()),
    ):
        for got, want in zip(
            torch.autograd.grad(loss, learned),
            torch.autograd.grad(naive_loss, learned, retain_graph=True),
            strict=True,
        ):
            torch.testing.assert_close(got, want, atol=1e-12, rtol=0)


def test_gradients_agree_with_finite_differences() -> None:
    module, (hidden, tokens, temperature) = make_head(bias=True), make_inputs()

    def scores(hidden: Tensor, weight: Tensor, bias: Tensor) -> tuple[Tensor, Tensor]:
        return lm_head._Head.apply(hidden, weight, bias, tokens, temperature, False, True)

    assert torch.autograd.gradcheck(scores, (hidden, module.weight, module.bias))


def test_a_frozen_head_gets_no_gradient_and_passes_it_on() -> None:
    module, (hidden, tokens, temperature) = make_head(), make_inputs()
    expected = torch.autograd.grad(naive(module, hidden, tokens, temperature)[0].sum(), hidden)[0]
    module.requires_grad_(False)
    action_logprobs(module, hidden, tokens, temperature)[0].sum().backward()
    assert module.weight.grad is None
    torch.testing.assert_close(hidden.grad, expected)


class Sizes(TorchDispatchMode):
    """Elements of every tensor that an operation makes."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[int] = []
        self.wide: list[int] = []  # of those in float32

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        made = func(*args, **(kwargs or {}))
        outputs = made if isinstance(made, list | tuple) else [made]
        tensors = [each for each in outputs if isinstance(each, Tensor)]
        self.seen += [each.numel() for each in tensors]
        self.wide += [each.numel() for each in tensors if each.dtype == torch.float32]
        return made


@pytest.mark.parametrize("name", HEADS)
def test_no_tensor_holds_more_than_a_chunk_of_logits(name: str) -> None:
    module, (hidden, tokens, temperature) = HEADS[name](), make_inputs()
    with Sizes() as sizes:
        logprobs, entropy = action_logprobs(module, hidden, tokens, temperature, learn_entropy=True)
        (logprobs + entropy).sum().backward()
    weight = HIDDEN * VOCABULARY  # its gradient is larger than a chunk here
    assert max(size for size in sizes.seen if size != weight) == 4 * VOCABULARY


def test_a_narrow_weights_gradient_is_not_summed_in_a_wide_one() -> None:
    module, (hidden, tokens, temperature) = make_head().bfloat16(), make_inputs(torch.bfloat16)
    with Sizes() as sizes:
        logprobs, _ = action_logprobs(module, hidden, tokens, temperature)
        logprobs.sum().backward()
    assert HIDDEN * VOCABULARY in sizes.seen
    assert HIDDEN * VOCABULARY not in sizes.wide
    exact = module.weight.detach().float().requires_grad_()
    logits = hidden.detach().float() @ exact.T / temperature[:, None]
    logits.log_softmax(-1).gather(1, tokens[:, None]).sum().backward()
    assert (module.weight.grad - exact.grad).norm() < 0.01 * exact.grad.norm()


@pytest.mark.parametrize("name", ["plain", "adapter"])
def test_a_float32_head_rounds_nothing_to_bfloat16(name: str) -> None:
    module = HEADS[name]().bfloat16()
    hidden, tokens, temperature = make_inputs(torch.bfloat16)
    narrow, _ = action_logprobs(module, hidden, tokens, temperature)
    wide, _ = action_logprobs(module, hidden, tokens, temperature, fp32=True)
    gradient = torch.autograd.grad(wide.sum(), [p for p in module.parameters() if p.requires_grad])
    assert {each.dtype for each in gradient} == {torch.bfloat16}
    exact, _ = naive(module.float(), hidden.detach().float(), tokens, temperature)
    assert wide.dtype == narrow.dtype == torch.float32
    torch.testing.assert_close(wide, exact, atol=1e-5, rtol=0)
    assert (narrow - exact).abs().max() > 1e-4


def test_no_tokens_are_no_error() -> None:
    module, (hidden, tokens, temperature) = make_head(), make_inputs()
    ours, entropy = action_logprobs(module, hidden[:0], tokens[:0], temperature[:0])
    assert ours.shape == entropy.shape == (0,)


def test_each_row_gets_its_scale_at_its_column_if_there_is_one() -> None:
    """As one part of a kernel, and in place."""
    grad, scale = torch.randn(5, 7), torch.randn(5, 1)
    at = torch.tensor([[0], [6], [-1], [7], [3]])
    expected = grad.clone()
    for row, column in ((0, 0), (1, 6), (4, 3)):
        expected[row, column] += scale[row, 0]
    assert torch.equal(lm_head.add_at_columns(grad, at, scale), expected)
    assert torch.equal(lm_head.scatter_columns(grad, at, scale), expected)
