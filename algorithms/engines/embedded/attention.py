"""Attention over packed rows of unequal length: one forward pass serves every call.

The input of a step is N tokens as one sequence [1, N] without padding: first the prefill chunks,
then the last token of each of the n rows, in row order. The last tokens attend as one batch, and
each chunk alone; a step without prefill has no chunks.

A step is one forward pass of the model itself with a `StepPlan` (see `model.attention`).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from agentrl.algorithms.model import attention
from agentrl.algorithms.model.load import Model
from agentrl.errors import PolicyError


@dataclass(frozen=True, slots=True)
class PrefillChunk:
    """Consecutive prompt tokens of one row: `size` tokens from packed index `start`."""

    row: int
    start: int
    size: int
    context: int  # keys that the last of them attends to, its own included


@dataclass(frozen=True, slots=True)
class StepPlan:
    """The input of one decoding step."""

    chunks: list[PrefillChunk]
    last: Tensor  # int64 [n], position of each row's last token
    context: int  # 1 + the largest position
    masks: dict[tuple[int, int | None], Tensor] = field(default_factory=dict)

    def attend(
        self, query: Tensor, key: Tensor, value: Tensor, scale: float | None, window: int | None
    ) -> Tensor:
        """Output [1, N, heads, dim]; key, value: KVPool layers [rows, key heads, capacity, dim]."""
        outputs = []
        for chunk in self.chunks:
            rows = slice(chunk.row, chunk.row + 1)
            whole = chunk.size == chunk.context and window is None
            output = scaled_dot_product_attention(
                query[:, :, chunk.start : chunk.start + chunk.size],
                key[rows, :, : chunk.context],
                value[rows, :, : chunk.context],
                attn_mask=None if whole else self.chunk_mask(chunk, window),
                is_causal=whole,
                scale=scale,
                enable_gqa=query.shape[1] != key.shape[1],
            )
            outputs.append(output.transpose(1, 2))
        outputs.append(self._attend_last(query, key, value, scale, window))
        return torch.cat(outputs, dim=1) if self.chunks else outputs[0]

    def _attend_last(
        self, query: Tensor, key: Tensor, value: Tensor, scale: float | None, window: int | None
    ) -> Tensor:
        # Query heads that share a key head are the query dimension of one matmul. SDPA would copy
        # every key once per query head: thirty times slower at seven heads per key.
        n, (heads, dim), shared = self.last.numel(), (query.shape[1], query.shape[3]), key.shape[1]
        queries = query[0, :, -n:].transpose(0, 1).reshape(n, shared, heads // shared, dim)
        queries = queries * (dim**-0.5 if scale is None else scale)
        scores = torch.matmul(queries, key[:n, :, : self.context].transpose(2, 3))
        scores = scores + self.last_mask(window, scores.dtype)
        weights = torch.softmax(scores, dim=-1, dtype=torch.float32).to(value.dtype)
        return torch.matmul(weights, value[:n, :, : self.context]).view(1, n, heads, -1)

    def last_mask(self, window: int | None, dtype: torch.dtype) -> Tensor:
        """Additive mask [n, 1, 1, context]: a row sees its own past and nothing after it."""
        key = (-1, window)
        if key not in self.masks:
            keys, last = torch.arange(self.context, device=self.last.device), self.last[:, None]
            hidden = keys > last
            if window is not None:
                hidden |= keys <= last - window
            mask = torch.zeros(hidden.shape, dtype=dtype, device=keys.device)
            self.masks[key] = mask.masked_fill_(hidden, float("-inf"))[:, None, None]
        return self.masks[key]

    def chunk_mask(self, chunk: PrefillChunk, window: int | None) -> Tensor:
        """Boolean mask [size, context]: true where a query sees a key."""
        key = (chunk.row, window)
        if key not in self.masks:
            keys = torch.arange(chunk.context, device=self.last.device)
            queries = keys[-chunk.size :, None]
            visible = keys <= queries
            if window is not None:
                visible &= keys > queries - window
            self.masks[key] = visible
        return self.masks[key]


def install(model: Model) -> None:
    """Compute the model's attention by `StepPlan.attend`.

    Raises PolicyError for a model whose output this would change or make depend on its batch."""
    network: Any = model
    reason = attention.incompatibility(network)
    if reason:
        raise PolicyError(
            f"model type {network.config.model_type!r} {reason}, so the embedded policy server "
            "cannot batch it; choose a decoder with plain or sliding-window attention"
        )
    attention.install(network)
