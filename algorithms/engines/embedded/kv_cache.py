"""Keys and values of every row, in one tensor each.

Owns the memory. Always true: whatever lies behind a row's length is finite, so masking it out is
exact. Written by the engine's thread only, inside a forward pass (`update`) or between two.
"""

from __future__ import annotations

import torch
from torch import Tensor
from transformers.cache_utils import Cache

CAPACITY = 256  # tokens per row to begin with


class KVPool(Cache):  # type: ignore[misc]
    """A transformers cache of [layers, rows, key heads, capacity, dim], allocated on first use."""

    def __init__(self, layers: int, rows: int) -> None:
        self.depth, self.rows = layers, rows
        self.capacity = CAPACITY
        self.tensors: list[Tensor] = []  # keys, values
        self._target = (torch.empty(0), torch.empty(0))  # row and position of each token fed
        self._slots: Tensor | None = None  # the same as indices into a flat layer, all key heads

    def __len__(self) -> int:
        return self.depth

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Positions are always given to the model; it need not count."""
        return 0

    def reserve(self, capacity: int) -> None:
        """Room for `capacity` tokens per row."""
        while self.capacity < capacity:
            self.capacity *= 2
        for index, old in enumerate(self.tensors):
            if old.shape[3] < self.capacity:
                new = old.new_zeros(*old.shape[:3], self.capacity, old.shape[4])
                new[:, :, :, : old.shape[3]] = old
                self.tensors[index] = new

    def set_write_positions(self, rows: Tensor, positions: Tensor) -> None:
        """Where the next forward pass writes its N tokens: int64 [N] each."""
        self._target, self._slots = (rows, positions), None

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: object, **kw: object
    ) -> tuple[Tensor, Tensor]:
        """Write the step's [1, key heads, N, dim]; returns the layer with all its rows."""
        if not self.tensors:
            self._allocate(key_states, value_states)
        if self._slots is None:
            heads, (rows, positions) = key_states.shape[1], self._target
            bases = rows[:, None] * heads + torch.arange(heads, device=rows.device)
            self._slots = (bases * self.capacity + positions[:, None]).view(-1)
        keys, values = (tensor[layer_idx] for tensor in self.tensors)
        for layer, new in ((keys, key_states), (values, value_states)):
            flat = new[0].transpose(0, 1).reshape(-1, new.shape[-1])
            layer.view(-1, new.shape[-1]).index_copy_(0, self._slots, flat)
        return keys, values

    def copy(self, source: int, target: int, length: int) -> None:
        for tensor in self.tensors:
            tensor[:, target, :, :length] = tensor[:, source, :, :length]

    def wipe(self) -> None:
        """Forget everything that was ever written, infinities included."""
        for tensor in self.tensors:
            tensor.zero_()

    def _allocate(self, keys: Tensor, values: Tensor) -> None:
        self.tensors = [
            new.new_zeros(self.depth, self.rows, new.shape[1], self.capacity, new.shape[-1])
            for new in (keys, values)
        ]
