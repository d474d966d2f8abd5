"""What runs inside vLLM's workers. They import it before they load a model, and on CPU it makes
linear layers read their weights at every call.

vLLM would pack them once, and the packed copy of an output layer that shares the embeddings is not
replaced when weights are reloaded: log-probs would be wrong by 0.1, without an error.
"""

from __future__ import annotations

from typing import Any

import vllm.model_executor.layers.utils as layers
from torch.nn import functional
from vllm.platforms import current_platform


class Extension:
    """Adds nothing to a worker: naming it has this module imported."""


def _unpacked(layer: Any, remove_weight: bool) -> None:
    layer.cpu_linear = functional.linear


if current_platform.is_cpu():
    layers.dispatch_cpu_unquantized_gemm = _unpacked
