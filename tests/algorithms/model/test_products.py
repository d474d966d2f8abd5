"""Products in bfloat16 on a CPU without kernels for them, against those in float64."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.nn import Linear, Sequential

from agentrl.algorithms.model import products
from agentrl.algorithms.model.lm_head import action_logprobs
from agentrl.algorithms.model.lora import add_adapter

HALF_UNIT = 2.0**-8  # largest relative error of rounding to bfloat16


@pytest.fixture(autouse=True)
def no_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(products, "has_kernels", lambda: False)
    monkeypatch.setattr(products, "BLOCK", 500)


def drawn(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape))).bfloat16()


def assert_rounded_once(found: Tensor, exact: Tensor) -> None:
    assert found.dtype == torch.bfloat16
    torch.testing.assert_close(found.double(), exact, rtol=1.01 * HALF_UNIT, atol=1e-4)


@pytest.mark.parametrize("shape", [(5, 7, 9), (3, 70, 20), (3, 20, 70), (1, 600, 3), (2, 3, 600)])
def test_a_product_is_rounded_once(shape: tuple[int, int, int]) -> None:
    a, b = drawn(*shape[:2]), drawn(*shape[1:])
    assert_rounded_once(products.mm(a, b), a.double() @ b.double())
    assert_rounded_once(products.mm(a, b.T.contiguous().T), a.double() @ b.double())
    sums = drawn(shape[0], shape[2])
    exact = sums.double() + 0.5 * (a.double() @ b.double())
    assert_rounded_once(products.add_mm(sums, a, b, 0.5), exact)


@pytest.mark.parametrize("bias", [False, True])
def test_a_layer_and_its_gradients_are_those_of_torch(bias: bool) -> None:
    layer = Linear(70, 30, bias=bias, dtype=torch.bfloat16)
    exact, x = copy.deepcopy(layer).double(), drawn(2, 6, 70).requires_grad_()
    products.install(Sequential(layer))
    wide, pull = x.detach().double().requires_grad_(), drawn(2, 6, 30)
    found, expected = layer(x), exact(wide)
    assert_rounded_once(found, expected)
    found.backward(pull)
    expected.backward(pull.double())
    pairs = zip((x, *layer.parameters()), (wide, *exact.parameters()), strict=True)
    for mine, own in pairs:
        assert mine.grad is not None
        assert own.grad is not None
        assert_rounded_once(mine.grad, own.grad)


def test_a_row_of_a_product_depends_on_no_other_row() -> None:
    a, b = drawn(64, 96), drawn(96, 40)
    whole = products.mm(a, b)
    for rows in (4, 5, 17, 33):
        assert torch.equal(products.mm(a[:rows], b), whole[:rows])


def test_adapter_and_head_compute_these_products(monkeypatch: pytest.MonkeyPatch) -> None:
    x, weight, down, up = drawn(6, 40), drawn(50, 40), drawn(4, 40), drawn(50, 4)
    head, leaves = Linear(50, 90, bias=False, dtype=torch.bfloat16), (down, up)
    for leaf in leaves:
        leaf.requires_grad_()
    seen: list[tuple[int, ...]] = []
    monkeypatch.setattr(products, "_by_blocks", counted(products._by_blocks, seen))
    output = add_adapter(x, products.linear(x, weight).detach(), weight, down, up, 2.0)
    tokens, heat = torch.arange(6), torch.ones(6)
    logprobs, _ = action_logprobs(head, output, tokens, heat)
    torch.autograd.backward(logprobs.sum())
    assert all(leaf.grad is not None for leaf in (*leaves, head.weight))
    assert len(seen) >= 8  # forward: the layer, down, the head's; backward: six
    assert logprobs.isfinite().all()


def counted(function: Callable[..., Tensor], seen: list[tuple[int, ...]]) -> Callable[..., Tensor]:
    def call(a: Tensor, b: Tensor, *more: Tensor) -> Tensor:
        seen.append(tuple(b.shape))
        return function(a, b, *more)

    return call
