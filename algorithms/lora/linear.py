"""A frozen linear layer with its adapter as one node of the graph."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable
from torch.nn.functional import linear


def add_adapter(
    x: Tensor, output: Tensor, weight: Tensor, down: Tensor, up: Tensor, scale: float
) -> Tensor:
    """output + scale * x down^T up^T, [..., out], in the memory of `output`.

    Autograd alone would write the layer's output and the adapter's part apart, and the gradients of
    the input by each, to read and add them afterwards.

    x: [..., in]. output: x weight^T and a bias, if any; nothing else may need it. weight: frozen.
    All are of one dtype."""
    added: Tensor = _AdaptedLinear.apply(x, output.detach(), weight, down, up, scale)  # type: ignore[no-untyped-call]
    return added


class _AdaptedLinear(Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, output: Tensor, weight: Tensor, down: Tensor, up: Tensor, scale: float
    ) -> Tensor:
        narrow = linear(x, down).flatten(0, -2)
        # One product that rounds once.
        output.view(-1, output.shape[-1]).addmm_(narrow, up.T, alpha=scale)
        ctx.mark_dirty(output)
        ctx.save_for_backward(x, weight, down, up, narrow)
        ctx.scale = scale
        return output

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, down, up, narrow = ctx.saved_tensors
        flat = grad.flatten(0, -2)
        pull = (flat @ up).mul_(ctx.scale)
        grad_x = None
        if ctx.needs_input_grad[0]:
            grad_x = (flat @ weight).addmm_(pull, down).view(x.shape)
        grad_down = pull.T @ x.flatten(0, -2)
        grad_up = flat.T @ narrow.mul(ctx.scale)
        return grad_x, None, None, grad_down, grad_up, None
