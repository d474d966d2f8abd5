from __future__ import annotations

import random
from collections.abc import Callable

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn.attention.flex_attention import flex_attention
from torch.nn.functional import scaled_dot_product_attention

from agentrl.algorithms.model import attention
from agentrl.algorithms.model.attention import TreePlan, tiles, visible
from agentrl.algorithms.model.packing import Forest, build_forest, depth_first


def forest_of(branches: int, longest: int, seed: int) -> Forest:
    """Branches that leave earlier ones at random places, or start anew."""
    dice = random.Random(seed)
    sequences = [np.array([0])]
    for token in range(1, branches + 1):
        trunk = dice.choice(sequences)
        tail = [token] * dice.randint(1, longest)
        sequences.append(np.array([*trunk[: dice.randint(0, len(trunk))], *tail]))
    order, shared = depth_first(sequences[1:])
    return build_forest([sequences[1:][i] for i in order], shared)


def plan_of(forest: Forest) -> TreePlan:
    return TreePlan(torch.from_numpy(forest.end), torch.from_numpy(forest.depth))


forests = st.builds(forest_of, st.integers(1, 12), st.sampled_from([2, 30]), st.integers(0, 10**6))
windows = st.sampled_from([None, 1, 3, 20, 1000])


def inputs(size: int, dtype: torch.dtype = torch.float64) -> list[Tensor]:
    """Queries of six heads, keys and values of two, in the strides that a model has."""
    draw = torch.Generator().manual_seed(0)
    shapes = [(1, size, heads, 8) for heads in (6, 2, 2)]
    tensors = [torch.randn(shape, generator=draw).to(dtype).transpose(1, 2) for shape in shapes]
    return [tensor.requires_grad_() for tensor in tensors]


def dense(plan: TreePlan, query: Tensor, key: Tensor, value: Tensor, window: int | None) -> Tensor:
    every = slice(0, len(plan.end))
    seen = visible(plan.end, plan.depth, every, every, window)
    key, value = (x.repeat_interleave(3, dim=1) for x in (key, value))
    output = scaled_dot_product_attention(query, key, value, attn_mask=seen, scale=0.3)
    return output.transpose(1, 2)


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention, "FLEX_BLOCK", 16)


@given(forests, windows)
@settings(deadline=None)
def test_a_node_sees_its_ancestors_and_itself_within_the_window(
    forest: Forest, window: int | None
) -> None:
    end, depth = torch.from_numpy(forest.end), torch.from_numpy(forest.depth)
    every = slice(0, len(end))
    expected = torch.zeros(len(end), len(end), dtype=torch.bool)
    for path in forest.paths:
        for n, node in enumerate(path.tolist()):
            first = 0 if window is None else max(0, n + 1 - window)
            expected[node, path[first : n + 1].tolist()] = True
    assert torch.equal(visible(end, depth, every, every, window), expected)


@given(forests, windows)
@settings(deadline=None)
def test_tiles_hold_every_pair_that_is_seen_once(forest: Forest, window: int | None) -> None:
    end, depth = torch.from_numpy(forest.end), torch.from_numpy(forest.depth)
    count = torch.zeros(len(end), len(end))
    for tile in tiles(end, depth, window, torch.float32):
        pairs = count[tile.queries, tile.keys]
        if tile.causal:
            pairs += torch.ones_like(pairs).tril_()
        else:
            pairs += 1 if tile.mask is None else tile.mask == 0
    every = slice(0, len(end))
    assert torch.equal(count, visible(end, depth, every, every, window).float())


@given(forests, windows)
@settings(deadline=None)
def test_it_is_attention_under_the_mask_forward_and_backward(
    forest: Forest, window: int | None
) -> None:
    plan, (query, key, value) = plan_of(forest), inputs(len(forest.end))
    output = plan.attend(query, key, value, 0.3, window)
    expected = dense(plan, query, key, value, window)
    torch.testing.assert_close(output, expected, atol=1e-12, rtol=0)
    weight = torch.linspace(-1, 1, output.numel(), dtype=output.dtype).view(output.shape)
    for ours, theirs in zip(
        torch.autograd.grad(output, (query, key, value), weight),
        torch.autograd.grad(expected, (query, key, value), weight),
        strict=True,
    ):
        torch.testing.assert_close(ours, theirs, atol=1e-11, rtol=0)


@pytest.mark.parametrize(("dtype", "error"), [(torch.float32, 1e-5), (torch.bfloat16, 2e-2)])
@pytest.mark.parametrize("window", [None, 20])
def test_low_precision_is_as_good_as_that_of_a_dense_mask(
    dtype: torch.dtype, error: float, window: int | None
) -> None:
    plan = plan_of(forest_of(12, 30, seed=1))
    tensors = inputs(len(plan.end), dtype)
    output = plan.attend(*tensors, 0.3, window)
    assert output.dtype is dtype
    exact = [tensor.detach().double().requires_grad_() for tensor in tensors]
    expected = dense(plan, exact[0], exact[1], exact[2], window)
    torch.testing.assert_close(output.double(), expected, atol=error, rtol=0)
    for ours, theirs in zip(
        torch.autograd.grad(output.sum(), tensors),
        torch.autograd.grad(expected.sum(), exact),
        strict=True,
    ):
        assert ours.dtype is dtype
        torch.testing.assert_close(ours.double(), theirs, atol=5 * error, rtol=5 * error)


def test_on_a_cpu_the_kernel_computes_in_float32(monkeypatch: pytest.MonkeyPatch) -> None:
    given = set()

    def noted(kernel: Callable[..., object]) -> Callable[..., object]:
        def call(*args: object, **options: object) -> object:
            given.update(each.dtype for each in args if isinstance(each, Tensor))
            return kernel(*args, **options)

        return call

    for name in ("_flash", "_flash_backward"):
        monkeypatch.setattr(attention, name, noted(getattr(attention, name)))
    plan = plan_of(forest_of(12, 30, seed=1))
    tensors = inputs(len(plan.end), torch.bfloat16)
    plan.attend(*tensors, 0.3, None).sum().backward()
    assert given == {torch.float32}


def test_inputs_whose_last_axis_is_not_dense() -> None:
    plan = plan_of(forest_of(5, 10, seed=2))
    tensors = inputs(len(plan.end))
    strided = [torch.stack([x, x], dim=-1)[..., 0] for x in tensors]
    torch.testing.assert_close(plan.attend(*strided, None, None), plan.attend(*tensors, None, None))


def test_values_of_a_smaller_size_than_keys() -> None:
    plan = plan_of(forest_of(5, 10, seed=2))
    query, key, value = inputs(len(plan.end))
    whole, part = (plan.attend(query, key, v, 0.3, None) for v in (value, value[..., :5]))
    torch.testing.assert_close(part, whole[..., :5], atol=1e-12, rtol=0)


def test_one_pass_of_many_layers_plans_once_for_each_window() -> None:
    plan = plan_of(forest_of(5, 10, seed=3))
    depth = int(plan.depth.max())
    for window in (None, 2, None, 2, depth + 1):
        plan.attend(*inputs(len(plan.end)), None, window)
    assert {window for window, _ in plan.tiles} == {None, 2}


@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@pytest.mark.parametrize("window", [None, 3])
def test_the_kernel_for_gpus_is_the_same_attention(
    monkeypatch: pytest.MonkeyPatch, window: int | None
) -> None:
    monkeypatch.setattr(attention, "_compiled_flex", lambda: flex_attention)
    plan = plan_of(forest_of(6, 40, seed=4))
    tensors = [tensor.detach() for tensor in inputs(len(plan.end), torch.float32)]
    ours = plan.attend(*tensors, 0.3, window)
    torch.testing.assert_close(plan.flex(*tensors, 0.3, window), ours, atol=1e-5, rtol=0)


def test_the_kernel_for_gpus_is_told_of_whole_blocks_alone() -> None:
    """With a last block that is not full it would read beyond the keys."""
    whole, uneven = (torch.empty(1, 2, size, 64) for size in (256, 255))
    assert attention.kernel_options(whole) == {"IS_DIVISIBLE": True}
    assert attention.kernel_options(uneven) == {}
