"""The extension of vLLM's workers, which import it before they load a model.

It adds a weight-transfer engine for one machine without GPUs. On a CPU it makes linear layers read
their weights at every call: vLLM would pack them once, and a reload does not replace the packed
copy of an output layer that is tied to the embeddings, so log-probs would be wrong by 0.1, without
an error.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import vllm.model_executor.layers.utils as layers
from torch import Tensor
from torch.nn import functional
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)
from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory
from vllm.model_executor.model_loader.reload import (
    finalize_layerwise_reload,
    initialize_layerwise_reload,
)
from vllm.platforms import current_platform

from agentrl.algorithms.engines.vllm.protocol import MEMORY


class Extension:
    """An empty extension; naming it makes vLLM import this module."""


@dataclass
class SharedMemory(WeightTransferInitInfo):  # type: ignore[misc]
    """A memory file that the learner writes between two updates."""

    path: str
    size: int


@dataclass
class WeightLayout(WeightTransferUpdateInfo):  # type: ignore[misc]
    """Name, dtype, shape and first byte of each weight in the memory file."""

    weights: list[dict[str, Any]]


class MemoryEngine(WeightTransferEngine[SharedMemory, WeightLayout]):  # type: ignore[misc]
    """Loads weights from the learner's shared memory."""

    init_info_cls = SharedMemory
    update_info_cls = WeightLayout

    def init_transfer_engine(self, init_info: SharedMemory) -> None:
        self._memory = torch.from_file(
            init_info.path, shared=True, size=init_info.size, dtype=torch.uint8
        )

    def start_weight_update(self) -> None:
        initialize_layerwise_reload(self.model)

    def update_weights(self, update_info: dict[str, Any]) -> None:
        # The base class synchronises an accelerator, which there may not be.
        self.receive_weights(self.parse_update_info(update_info))

    def receive_weights(self, update_info: WeightLayout) -> None:
        self.model.load_weights(self._read(update_info))

    def finish_weight_update(self) -> None:
        finalize_layerwise_reload(self.model, self.model_config)

    def shutdown(self) -> None:
        self._memory = torch.empty(0, dtype=torch.uint8)

    def _read(self, layout: WeightLayout) -> Iterator[tuple[str, Tensor]]:
        for entry in layout.weights:
            dtype, shape = getattr(torch, entry["dtype"]), torch.Size(entry["shape"])
            end = entry["start"] + shape.numel() * dtype.itemsize
            yield entry["name"], self._memory[entry["start"] : end].view(dtype).view(shape)


def _unpacked(layer: Any, remove_weight: bool) -> None:
    layer.cpu_linear = functional.linear


WeightTransferEngineFactory.register_engine(MEMORY, MemoryEngine)
if current_platform.is_cpu():
    layers.dispatch_cpu_unquantized_gemm = _unpacked
