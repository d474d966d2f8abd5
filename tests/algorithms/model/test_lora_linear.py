"""A layer with its adapter against what autograd makes of the same products."""

import pytest
import torch
from torch import Tensor
from torch.nn.functional import linear

from agentrl.algorithms.model.lora import add_adapter

SCALE = 1.5


def tensors(*, learn: bool) -> tuple[Tensor, ...]:
    """Input [1, 5, 4], weight [6, 4], bias [6], down [2, 4] and up [6, 2]."""
    torch.manual_seed(0)
    shapes = (1, 5, 4), (6, 4), (6,), (2, 4), (6, 2)
    x, weight, bias, down, up = (torch.randn(shape, dtype=torch.float64) for shape in shapes)
    for trained in (*([x] if learn else []), down, up):
        trained.requires_grad_()
    return x, weight, bias, down, up


def gradients(output: Tensor, wanted: list[Tensor]) -> tuple[Tensor, ...]:
    pull = torch.randn(output.shape, dtype=output.dtype, generator=torch.Generator().manual_seed(1))
    return torch.autograd.grad(output, wanted, pull)


@pytest.mark.parametrize("learn", [True, False], ids=["inner layer", "first layer"])
def test_output_and_gradients_are_those_of_autograd(learn: bool) -> None:
    x, weight, bias, down, up = tensors(learn=learn)
    wanted = [*([x] if learn else []), down, up]
    usual = linear(x, weight, bias) + SCALE * linear(linear(x, down), up)
    before = linear(x, weight, bias)
    fused = add_adapter(x, before, weight, down, up, SCALE)
    assert fused.data_ptr() == before.data_ptr()
    torch.testing.assert_close(fused, usual, rtol=0, atol=1e-12)
    for ours, theirs in zip(gradients(fused, wanted), gradients(usual, wanted), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-12)


def test_without_gradients_it_is_the_same_output() -> None:
    x, weight, bias, down, up = tensors(learn=True)
    usual = add_adapter(x, linear(x, weight, bias), weight, down, up, SCALE)
    with torch.no_grad():
        assert torch.equal(add_adapter(x, linear(x, weight, bias), weight, down, up, SCALE), usual)
