"""Attention over packed rows of unequal length: one forward pass serves every call.

The input of a step is N tokens as one sequence [1, N] without padding: first the prefill chunks,
then the last token of each of the n rows, in row order. The last tokens attend as one batch, and
each chunk alone; a step without prefill has no chunks.

A step is one forward pass of the model itself with a `StepPlan` (see `model.attention`).
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.nn.functional import pad, scaled_dot_product_attention

from agentrl.algorithms.model import attention
from agentrl.algorithms.model.attention import KEY_BLOCK, whole_blocks
from agentrl.algorithms.model.load import Model

# Rows of a product that MKL, for 32 bits, computes in the order of larger ones. In 16 bits it would
# take two, but they read the weights slower than four.
FEW_ROWS = 4


@dataclass(frozen=True, slots=True)
class PrefillChunk:
    """Consecutive prompt tokens of one row: `size` tokens from packed index `start`, after
    the padding."""

    row: int
    start: int
    size: int
    context: int  # keys that the last of them attends to, its own included


@dataclass(frozen=True, slots=True)
class StepPlan:
    """The input of one decoding step."""

    chunks: list[PrefillChunk]
    last: Tensor  # int64 [n], position of each row's last token
    context: int  # at least 1 + the largest position, in whole blocks
    padding: int = 0  # tokens before the chunks, of no row
    masks: dict[tuple[int, int | None], Tensor] = field(default_factory=dict)

    def attend(
        self, query: Tensor, key: Tensor, value: Tensor, scale: float | None, window: int | None
    ) -> Tensor:
        """Output [1, N, heads, dim]; key, value: KVPool layers [rows, key heads, capacity, dim]."""
        scale = query.shape[-1] ** -0.5 if scale is None else scale
        first = query.new_zeros(1, self.padding, query.shape[1], value.shape[-1])
        outputs = [first] if self.padding else []
        for chunk in self.chunks:
            rows = slice(chunk.row, chunk.row + 1)
            start = self.padding + chunk.start
            queries = query[:, :, start : start + chunk.size]
            attend = _flash if query.is_cuda else _products
            mask = self.chunk_mask(chunk, window, query)
            context = mask.shape[-1]
            output = attend(queries, key[rows, :, :context], value[rows, :, :context], mask, scale)
            outputs.append(output.transpose(1, 2))
        n, context = self.last.numel(), self.context
        # [n, heads, 1, dim]: each row is a batch of its own
        queries = query[:, :, -n:].transpose(0, 2)
        mask = self.last_mask(window, query.dtype)
        output = _products(queries, key[:n, :, :context], value[:n, :, :context], mask, scale)
        outputs.append(output[None, :, :, 0])
        return torch.cat(outputs, dim=1) if len(outputs) > 1 else outputs[0]

    def last_mask(self, window: int | None, dtype: torch.dtype) -> Tensor:
        """Additive mask [n, 1, 1, context]: a row sees its own past and nothing after it."""
        key = (-1, window)
        if key not in self.masks:
            self.masks[key] = _mask(self.last[:, None], self.context, window, dtype)[:, None]
        return self.masks[key]

    def chunk_mask(self, chunk: PrefillChunk, window: int | None, query: Tensor) -> Tensor:
        """Additive mask [size, context] of a chunk."""
        key = (chunk.row, window)
        if key not in self.masks:
            end = chunk.context
            at = torch.arange(end - chunk.size, end, device=query.device)
            width = end if query.is_cuda else whole_blocks(end, query.dtype)
            self.masks[key] = _mask(at, width, window, query.dtype)
        return self.masks[key]


def keys_read(context: int, capacity: int, dtype: torch.dtype, device: str) -> int:
    """Keys of a row that decoding reads: whole blocks. In 16 bits on a CPU, whose products need
    keys without gaps between heads, all up to the capacity if these are at most twice as many: that
    is faster than a copy. device: its type."""
    blocks, copied = whole_blocks(context, dtype), dtype.itemsize == 2 and device == "cpu"
    return capacity if copied and capacity <= 2 * blocks else blocks


def _mask(at: Tensor, width: int, window: int | None, dtype: torch.dtype) -> Tensor:
    """[..., width]: 0 where the query at a position sees a key, else minus infinity."""
    keys, at = torch.arange(width, device=at.device), at[..., None]
    hidden = keys > at
    if window is not None:
        hidden |= keys <= at - window
    mask = torch.zeros(hidden.shape, dtype=dtype, device=keys.device)
    return mask.masked_fill_(hidden, float("-inf"))


def _flash(query: Tensor, key: Tensor, value: Tensor, mask: Tensor, scale: float) -> Tensor:
    shared = query.shape[1] != key.shape[1]
    return scaled_dot_product_attention(
        query, key, value, attn_mask=mask, scale=scale, enable_gqa=shared
    )


def _products(query: Tensor, key: Tensor, value: Tensor, mask: Tensor, scale: float) -> Tensor:
    """[B, heads, M, dim] queries -> [B, heads, M, value dim].

    On a CPU the result of a query has the same bits whatever else is computed: a product of less
    than FEW rows, or of another number of keys, would add in another order, so it gets more rows,
    and keys are added in blocks of one size."""
    (batch, heads, size, dim), shared = query.shape, key.shape[1]
    if query.dtype.itemsize == 2 and not query.is_cuda:
        return _narrow_products(query * scale, key, value, mask)
    # Query heads that share a key head are one dimension of a product. SDPA would copy every key
    # once per query head: thirty times slower at seven heads per key.
    queries = (query * scale).reshape(batch, shared, -1, dim)
    rows = queries.shape[2]
    more = 0 if query.is_cuda else max(FEW_ROWS - rows, 0)
    queries = pad(queries, (0, 0, 0, more)) if more else queries
    scores = torch.matmul(queries, key.transpose(2, 3))[:, :, :rows]
    scores = scores.view(batch, shared, -1, size, scores.shape[-1]) + mask.unsqueeze(-3)
    weights = torch.softmax(scores, dim=-1, dtype=torch.float32).to(value.dtype).flatten(2, 3)
    weights = pad(weights, (0, 0, 0, more)) if more else weights
    step = value.shape[2] if value.is_cuda else KEY_BLOCK
    output = torch.matmul(weights[..., :step], value[:, :, :step])
    for start in range(step, value.shape[2], step):
        block = slice(start, start + step)
        output += torch.matmul(weights[..., block], value[:, :, block])
    return output[:, :, :rows].reshape(batch, heads, size, -1)


def _narrow_products(query: Tensor, key: Tensor, value: Tensor, mask: Tensor) -> Tensor:
    """`_products` of scaled queries in 16 bits on a CPU, whose kernels add in float32 and in one
    order for any number of rows and keys."""
    (batch, heads, size, dim), (_, shared, context, _) = query.shape, key.shape
    # The kernels take several times as long for keys with gaps between heads.
    keys, values = (x.contiguous().view(batch * shared, context, -1) for x in (key, value))
    scores = torch.bmm(query.reshape(batch * shared, -1, dim), keys.transpose(1, 2))
    # [batch, heads, size, context], to which the mask broadcasts
    weights = torch.softmax(scores.view(batch, heads, size, context).add_(mask), dim=-1)
    return torch.bmm(weights.view(batch * shared, -1, context), values).view(batch, heads, size, -1)


def install(model: Model) -> None:
    """Compute the model's attention by `StepPlan.attend`: see `proof` for which models."""
    attention.install(model)
