"""Matrix products in bfloat16 on a CPU.

A CPU with kernels for them (AVX-512) reads weights in a layout of its own. A plain product converts
the layout of its weight at every call, which for a few rows takes as long as the multiplication, so
the policy server keeps weights of linear layers in that layout. The results are bitwise equal, and
the copy takes as much memory as the layer.

On a CPU without such kernels torch computes these products seven times more slowly than in float32,
and those of a backward pass thirty times. On such a CPU this module computes them in float32, from
weights that are converted in blocks as they are read, and rounds once, as the kernels do.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable
from torch.nn import Linear, Module
from torch.nn.functional import linear as plain_linear

BLOCK = 2**20  # elements of a weight per conversion: 4 MiB, which fit into a cache
ROWS = 64  # rows for which weights are packed; other numbers of rows use the same layout
_operations: Any = torch.ops.mkldnn


@cache
def has_kernels() -> bool:
    """Whether this CPU has kernels for products in bfloat16."""
    built: bool = torch._C._has_mkldnn
    return built and bool(_operations._is_mkldnn_bf16_supported())


def in_float32(x: Tensor) -> bool:
    """Whether products with this tensor are computed in float32."""
    return x.dtype == torch.bfloat16 and x.device.type == "cpu" and not has_kernels()


def mm(a: Tensor, b: Tensor) -> Tensor:
    """a @ b of two matrices [N, K] and [K, M], rounded once. The order of its sums depends on b's
    shape alone."""
    return _by_blocks(a, b) if in_float32(a) else a @ b


def add_mm(output: Tensor, a: Tensor, b: Tensor, scale: float = 1.0) -> Tensor:
    """output + scale * a @ b in the memory of `output`, rounded once."""
    if not in_float32(a):
        return output.addmm_(a, b, alpha=scale)
    return output.copy_(torch.addmm(output.float(), a.float(), b.float(), alpha=scale))


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Like torch's `linear`."""
    if not in_float32(x):
        return plain_linear(x, weight, bias)
    product: Tensor = _Linear.apply(x, weight, bias)  # type: ignore[no-untyped-call]
    return product


def _by_blocks(a: Tensor, b: Tensor, bias: Tensor | None = None) -> Tensor:
    """a @ b, computed in float32 and rounded once. The blocks of b divide its longer axis."""
    wide, (size, width) = a.float(), b.shape
    if size > width and b.numel() > BLOCK:
        step, sums = max(1, BLOCK // width), wide.new_zeros(len(a), width)
        for at in range(0, size, step):
            sums.addmm_(wide[:, at : at + step], b[at : at + step].float())
        return (sums if bias is None else sums.add_(bias)).to(a.dtype)
    step, output = max(1, BLOCK // size), a.new_empty(len(a), width)
    for at in range(0, width, step):
        part = wide @ b[:, at : at + step].float()
        output[:, at : at + step] = part if bias is None else part.add_(bias[at : at + step])
    return output


class _Linear(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(x, weight)
        product = _by_blocks(x.flatten(0, -2), weight.T, bias)
        return product.view(*x.shape[:-1], -1)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        (x, weight), flat = ctx.saved_tensors, grad.flatten(0, -2)
        wants_x, wants_weight, wants_bias = ctx.needs_input_grad
        return (
            mm(flat, weight).view(x.shape) if wants_x else None,
            mm(flat.T, x.flatten(0, -2)) if wants_weight else None,
            flat.sum(0) if wants_bias else None,
        )


class NarrowLinear:
    """Replaces the forward method of a layer. If the CPU has the kernels, it multiplies with the
    packed weight in inference mode, which only the engine uses. Invariant: the packed weight equals
    the layer's. An in-place write increments the weight's version, except by a fused optimizer;
    after that the engine calls `forget`."""

    def __init__(self, layer: Linear) -> None:
        self.layer = layer
        self.packed: Tensor | None = None
        self.source = (0, 0)  # address and version of the weight that is packed

    def __call__(self, x: Tensor) -> Tensor:
        weight, bias = self.layer.weight, self.layer.bias
        packs = torch.is_inference_mode_enabled() and has_kernels()
        if not packs or x.dtype != weight.dtype:
            return linear(x, weight, bias)
        source = weight.data_ptr(), weight._version
        if self.packed is None or self.source != source:
            self.packed = _operations._reorder_linear_weight(weight.detach(), ROWS)
            self.source = source
        product: Tensor = _operations._linear_pointwise(x, self.packed, bias, "none", [], "")
        return product

    def __reduce__(self) -> tuple[type[NarrowLinear], tuple[Linear]]:
        return NarrowLinear, (self.layer,)  # a copied layer has no packed weight


def install(model: Module) -> None:
    """Multiply by `NarrowLinear` in the model's linear layers in bfloat16 on a CPU."""
    for layer in model.modules():
        if type(layer) is not Linear or "forward" in vars(layer):  # quantised, or installed before
            continue
        if layer.weight.dtype == torch.bfloat16 and layer.weight.device.type == "cpu":
            layer.forward = NarrowLinear(layer)  # type: ignore[assignment]


def forget(model: Module) -> None:
    """Drop the packed weight; called when the weights have changed."""
    for layer in model.modules():
        if isinstance(forward := vars(layer).get("forward"), NarrowLinear):
            forward.packed = None
