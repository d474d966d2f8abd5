"""Fewer passes over activations: Liger Kernel's norms and gated activations on the modules of one
loaded model, and a frozen linear layer with its adapter as one node of the graph.

Liger's kernels are Triton's, so the model must be on an NVIDIA GPU; sampler and learner that share
it both use them.
"""

from __future__ import annotations

import sys
from typing import Any

from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable
from torch.nn.functional import linear

from agentrl.errors import PolicyError

KEY = "learner.liger_kernel"


def use_liger(model: Any) -> None:
    """Replace the model's norms and gated activations. Raises PolicyError if that cannot be."""
    if model.device.type != "cuda":
        raise PolicyError(
            f"{KEY}: the policy is on {model.device.type}, not on a GPU; leave it out"
        )
    try:
        from liger_kernel.transformers import monkey_patch
    except ImportError as error:
        raise PolicyError(
            f"{KEY}: liger-kernel cannot be imported ({error}); pip install 'agentrl[liger]'"
        ) from None
    kind = model.config.model_type
    if kind not in monkey_patch.MODEL_TYPE_TO_APPLY_LIGER_FN:
        raise PolicyError(f"{KEY}: Liger Kernel has none for model type {kind!r}; leave it out")
    # Liger also replaces classes and functions of transformers' module, for models that are loaded
    # later, which may be on a CPU.
    module = vars(sys.modules[type(model).__module__])
    before = dict(module)
    try:
        monkey_patch._apply_liger_kernel_to_instance(
            model, rope=False, cross_entropy=False, fused_linear_cross_entropy=False
        )
    finally:
        module.update(before)


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
