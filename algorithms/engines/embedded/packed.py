"""Linear layers in bfloat16 with their weights laid out as the CPU's matrix product reads them.

A plain product lays its weight out anew at every call, which for a few rows takes as long as the
multiplication. The packed weight gives the same bits, and takes as much memory again as the layer.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import Linear
from torch.nn.functional import linear

from agentrl.algorithms.model.load import Model, packs_weights

ROWS = 64  # for which weights are laid out; other numbers of rows read the same layout
_operations: Any = torch.ops.mkldnn


class PackedLinear:
    """Called in place of a layer's own forward. In inference mode, which only the engine uses, it
    multiplies with the packed weight; elsewhere, where gradients are wanted, it is the layer's own.

    Always true: the packed weight is the layer's. A write in place counts up its version, but for a
    fused optimizer's, after which the engine calls `forget`."""

    def __init__(self, layer: Linear) -> None:
        self.layer = layer
        self.packed: Tensor | None = None
        self.source = (0, 0)  # address and version of the weight that is packed

    def __call__(self, x: Tensor) -> Tensor:
        weight, bias = self.layer.weight, self.layer.bias
        if not torch.is_inference_mode_enabled() or x.dtype != weight.dtype:
            return linear(x, weight, bias)
        source = weight.data_ptr(), weight._version
        if self.packed is None or self.source != source:
            self.packed = _operations._reorder_linear_weight(weight.detach(), ROWS)
            self.source = source
        product: Tensor = _operations._linear_pointwise(x, self.packed, bias, "none", [], "")
        return product

    def __reduce__(self) -> tuple[type[PackedLinear], tuple[Linear]]:
        return PackedLinear, (self.layer,)  # of a copied layer, without the packed weight


def install(model: Model) -> None:
    """Pack the weights of linear layers once the engine multiplies with them."""
    for layer in model.modules() if packs_weights() else ():
        if type(layer) is not Linear or "forward" in vars(layer):  # quantised, or installed before
            continue
        if layer.weight.dtype == torch.bfloat16 and layer.weight.device.type == "cpu":
            layer.forward = PackedLinear(layer)  # type: ignore[assignment]


def forget(model: Model) -> None:
    """Called when the weights have changed."""
    for layer in model.modules():
        if isinstance(own := vars(layer).get("forward"), PackedLinear):
            own.packed = None
