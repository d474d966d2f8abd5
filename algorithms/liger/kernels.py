"""Fewer passes over activations: Liger Kernel's norms and gated activations on the modules of one
loaded model.

Its kernels are Triton's, so the model must be on an NVIDIA GPU; sampler and learner that share it
both use them.
"""

from __future__ import annotations

import sys
from typing import Any

from agentrl.errors import PolicyError, install_command

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
            f"{KEY}: liger-kernel cannot be imported ({error}); {install_command('liger')}"
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
