"""Batched attention of the embedded engine: one forward pass serves every call, over packed rows of
unequal length, with the KV cache.

A step is one forward pass of the model itself with a `StepPlan` (see `model.attention`). Its input
is N tokens as one sequence [1, N] without padding: first the prefill chunks, then the last token of
each of the n rows, in row order. The last tokens attend as one batch, and each chunk alone; a step
without prefill has no chunks.

The KV cache is one tensor each for keys and values, and the table of tokens in its rows. Only the
engine's thread writes it, inside a forward pass (`KVPool.write`) or between two.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from inspect import signature
from math import prod
from mmap import MAP_ANONYMOUS, MAP_PRIVATE, mmap
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.functional import pad, scaled_dot_product_attention
from transformers.cache_utils import Cache, CacheLayerMixin

from agentrl.algorithms.model import attention
from agentrl.algorithms.model.attention import KEY_BLOCK, whole_blocks
from agentrl.algorithms.model.load import Model
from agentrl.core.types import Sampling

# Minimum rows of a product. From this number on, MKL adds in the same order for any number of rows
# in 32 bits. In 16 bits two rows would suffice, but read the weights more slowly than four.
FEW_ROWS = 4


@dataclass(frozen=True, slots=True)
class PrefillChunk:
    """Consecutive prompt tokens of one row: `size` tokens from packed index `start`, after
    the padding."""

    row: int
    start: int
    size: int
    context: int  # keys that the last token of the chunk attends to, including its own


@dataclass(frozen=True, slots=True)
class StepPlan:
    """The input of one decoding step."""

    chunks: list[PrefillChunk]
    last: Tensor  # int64 [n], position of each row's last token
    context: int  # keys to read, in whole blocks; at least 1 + the largest position
    padding: int = 0  # padding tokens before the chunks
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
        """Additive mask [n, 1, 1, context]: a row attends only to its own past."""
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
    """The number of keys per row that decoding reads: whole blocks. Products in 16 bits on a CPU
    need contiguous keys, so there all keys up to the capacity are read if they are at most twice as
    many, which is faster than a copy. device: type of the device."""
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

    On a CPU the result of a query is bitwise independent of the rest of the batch. A product with
    few rows, or with another number of keys, would add in another order, so rows are padded to a
    minimum, and keys are added in blocks of a fixed size."""
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
    """`_products` for scaled queries in 16 bits on a CPU: its kernels add in float32, and in the
    same order for any number of rows and keys."""
    (batch, heads, size, dim), (_, shared, context, _) = query.shape, key.shape
    # The kernels take several times as long for keys with gaps between heads.
    keys, values = (x.contiguous().view(batch * shared, context, -1) for x in (key, value))
    scores = torch.bmm(query.reshape(batch * shared, -1, dim), keys.transpose(1, 2))
    # [batch, heads, size, context], to which the mask broadcasts
    weights = torch.softmax(scores.view(batch, heads, size, context).add_(mask), dim=-1)
    return torch.bmm(weights.view(batch * shared, -1, context), values).view(batch, heads, size, -1)


def install_attention(model: Model) -> None:
    """Compute the model's attention by `StepPlan.attend`: see `proof` for which models."""
    attention.install(model)


Spans = Sequence[tuple[int, int]]
TopTokens = list[tuple[int, float]]
"""The most likely tokens at a position and their log-probs, the first one first."""


@dataclass(frozen=True, slots=True)
class TokenUpdate:
    """New tokens of a call, with their log-probs. `finish` is set on the last update.

    finish: stop (end of sequence, or `GenerationRequest.stop`), length, cancelled, or error.
    spans: (index of the first token within this update, version that sampled from there on).
    top: the most probable tokens at each new token; empty: not requested.
    """

    tokens: list[int]
    logprobs: list[float]
    finish: str | None = None
    error: str = ""
    spans: Spans = ()
    top: Sequence[TopTokens] = ()


@dataclass(frozen=True, slots=True, eq=False)
class GenerationRequest:
    """A prompt to complete. Compared by identity: two equal requests are two requests."""

    prompt: NDArray[np.int32]
    sampling: Sampling
    seed: int  # 0 <= seed < 2**64
    receive: Callable[[TokenUpdate], None]  # called where the engine's `deliver` runs it
    stream: bool = False  # an update per token instead of one at the end
    policy: int = 0  # number of the policy
    stop: Callable[[int], bool] | None = None  # called with every token; true ends the request
    ignore_eos: bool = False
    top: int = 0  # number of most probable tokens to report
    rotary: NDArray[np.int64] | None = None  # [axes, P], positions of the prompt; None: its places


class PoolLayer(CacheLayerMixin):  # type: ignore[misc]
    """A layer of a pool, by the protocol of transformers 5.2 and after. A forward pass has its own
    positions and a `StepPlan` with windows, so the layer reports lengths and masks as if the cache
    were empty."""

    is_sliding = False

    def __init__(self, pool: KVPool, index: int) -> None:
        super().__init__()
        self.pool, self.index = pool, index

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Nothing: the pool allocates all layers at its first update."""

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: object, **kw: object
    ) -> tuple[Tensor, Tensor]:
        return self.pool.write(self.index, key_states, value_states)

    def get_seq_length(self) -> int:
        return 0

    def get_mask_sizes(self, query: Tensor | int) -> tuple[int, int]:
        """Keys and their offset. query: number of queries, or before 5.4 their positions."""
        return (query if isinstance(query, int) else len(query)), 0

    def get_max_length(self) -> int:
        return self.pool.largest

    get_max_cache_shape = get_max_length  # older name of the method in transformers


class KVPool(Cache):  # type: ignore[misc]
    """A transformers cache of [layers, rows, key heads, capacity, dim], allocated on first use.

    transformers queries the state of a cache at its layers (`PoolLayer`). Invariant: entries after
    a row's length are finite, so masking them is exact. It grows with the longest row, to at most
    `largest` tokens per row (`estimate` counts these)."""

    def __init__(self, layers: int, rows: int, capacity: int, largest: int) -> None:
        """capacity: tokens per row, which doubles when more are needed."""
        super().__init__(layers=[PoolLayer(self, index) for index in range(layers)])
        self.rows, self.largest = rows, largest
        self.capacity = min(capacity, largest)
        self.tensors: list[Tensor] = []  # keys, values
        self._target = (torch.empty(0), torch.empty(0))  # row and position of each input token
        # The slots as indices into a flattened layer, by key head.
        self._slots: Tensor | None = None

    def reserve(self, capacity: int, length: NDArray[np.int64]) -> None:
        """Make room for `capacity` tokens per row. length: of each row, in tokens; only these are
        copied, because entries that are never written take no memory on a CPU."""
        while self.capacity < capacity:
            self.capacity = min(2 * self.capacity, self.largest)
        for index, old in enumerate(self.tensors):
            if old.shape[3] < self.capacity:
                new = _zeros(old, *old.shape[:3], self.capacity, old.shape[4])
                for row in np.flatnonzero(length).tolist():
                    new[:, row, :, : length[row]] = old[:, row, :, : length[row]]
                self.tensors[index] = new

    def set_write_positions(self, rows: Tensor, positions: Tensor) -> None:
        """Set where the next forward pass writes its N tokens: int64 [N] each."""
        self._target, self._slots = (rows, positions), None

    def write(self, layer: int, key_states: Tensor, value_states: Tensor) -> tuple[Tensor, Tensor]:
        """Write a step's [1, key heads, N, dim]; returns the layer's keys and values."""
        if not self.tensors:
            self.tensors = [
                _zeros(new, len(self), self.rows, new.shape[1], self.capacity, new.shape[-1])
                for new in (key_states, value_states)
            ]
        if self._slots is None:
            heads, (rows, positions) = key_states.shape[1], self._target
            bases = rows[:, None] * heads + torch.arange(heads, device=rows.device)
            self._slots = (bases * self.capacity + positions[:, None]).view(-1)
        keys, values = (tensor[layer] for tensor in self.tensors)
        for cached, new in ((keys, key_states), (values, value_states)):
            flat = new[0].transpose(0, 1).reshape(-1, new.shape[-1])
            cached.view(-1, new.shape[-1]).index_copy_(0, self._slots, flat)
        return keys, values

    def copy(self, source: int, target: int, length: int) -> None:
        for tensor in self.tensors:
            tensor[:, target, :, :length] = tensor[:, source, :, :length]

    def wipe(self) -> None:
        """Give the memory back; the next write begins with zeros again."""
        self.tensors.clear()


def _zeros(like: Tensor, *shape: int) -> Tensor:
    """Zeros on the device of `like`. On a CPU they are pages that the system provides when they are
    written: torch would write all of them."""
    if like.device.type != "cpu":
        return like.new_zeros(shape)
    # Not numpy's, which asks for pages of 2 MiB, as large as ten rows of a layer.
    pages = mmap(-1, max(1, prod(shape) * like.itemsize), flags=MAP_PRIVATE | MAP_ANONYMOUS)
    return torch.frombuffer(pages, dtype=like.dtype, count=prod(shape)).view(shape)


def cache_argument(model: torch.nn.Module) -> str:
    """The argument of a model's forward that is its cache, which transformers 5.24 has renamed."""
    network: Any = model
    parameters = signature(network.base_model.forward).parameters
    return "cache" if "cache" in parameters else "past_key_values"


class RowTable:
    """The state of `limit` rows that may run at once and `idle` cached ones, `context` tokens each.

    Rows [0, n) are running, contiguous so that attention reads them without a gather; rows
    [limit, size) are the prefix cache of ended requests. Invariant: the keys of
    `tokens[row, :length[row]]` are in the cache, and a running row has at least one token more."""

    def __init__(self, limit: int, idle: int, context: int) -> None:
        size = limit + idle
        self.limit = limit
        self.n = 0
        self.calls: list[GenerationRequest] = []
        # Spans of running rows; empty: a single version.
        self.spans: list[list[tuple[int, int]]] = []
        # For running rows, one list per sampled token.
        self.top_logprobs: list[list[TopTokens]] = []
        self.tokens = np.zeros((size, context), np.int32)
        self.length = np.zeros(size, np.int64)  # tokens whose keys are in the cache
        self.known = np.zeros(size, np.int64)  # tokens of prompt and completion
        self.policy = np.zeros(size, np.int64)  # number of the policy that computed the keys
        self.used = np.zeros(size, np.int64)  # clock at the last use of an idle row
        self.clock = 0
        self.prompt = np.zeros(limit, np.int64)  # tokens of the prompt
        self.end = np.zeros(limit, np.int64)  # value of `known` at which the completion ends
        # Needs each token immediately: streams, or has `stop`.
        self.watched = np.zeros(limit, np.bool_)
        self.seed = np.zeros(limit, np.uint64)
        self.ignore_eos = np.zeros(limit, np.bool_)
        self.top = np.zeros(limit, np.int64)  # number of most probable tokens to report
        self.temperature = np.zeros(limit)
        self.top_p = np.zeros(limit)
        self.top_k = np.zeros(limit, np.int64)
        self.logprobs = np.zeros((limit, context), np.float32)
        self._columns = (
            self.length, self.known, self.policy, self.prompt, self.end, self.watched,
            self.ignore_eos, self.top, self.seed, self.temperature, self.top_p, self.top_k,
        )  # fmt: skip

    def shared(self, tokens: NDArray[np.int32], policy: int) -> NDArray[np.int64]:
        """Length of the common prefix of `tokens` with each row's tokens, int64 [rows]; 0 for rows
        of another policy."""
        different = self.tokens[:, : len(tokens)] != tokens
        first = different.argmax(axis=1)
        first[~different[np.arange(len(first)), first]] = len(tokens)
        shared: NDArray[np.int64] = np.minimum(first, self.known) * (self.policy == policy)
        return shared

    def source(self, prompt: NDArray[np.int32], policy: int) -> tuple[int, int, int]:
        """The row of a policy with the longest cached prefix of a prompt, the prefix's length, and
        the longest length once the running rows have finished their prompts. The prefix excludes
        the prompt's last token, which the model must compute."""
        if len(prompt) == 1:
            return 0, 0, 0
        shared = self.shared(prompt[:-1], policy)
        ready = np.minimum(shared, self.length)
        row = int(ready.argmax())
        return row, int(ready[row]), int(shared.max())

    def add(self, call: GenerationRequest, pool: KVPool, source: int, shared: int) -> None:
        """Start a call in the next running row; copies the first `shared` keys of row `source`."""
        row, sampling, size = self.n, call.sampling, len(call.prompt)
        if shared:
            self.clock += 1
            self.used[source] = self.clock
            pool.copy(source, row, shared)
        self.tokens[row, :size] = call.prompt
        self.length[row], self.known[row], self.prompt[row] = shared, size, size
        self.policy[row] = call.policy
        free = self.tokens.shape[1] - size
        self.end[row] = size + min(free, sampling.max_tokens or free)
        self.watched[row] = call.stream or call.stop is not None
        self.ignore_eos[row], self.top[row], self.seed[row] = call.ignore_eos, call.top, call.seed
        self.temperature[row] = sampling.temperature
        self.top_p[row], self.top_k[row] = sampling.top_p, sampling.top_k
        self.calls.append(call)
        self.spans.append([])
        self.top_logprobs.append([])
        self.n += 1

    def completion(self, row: int) -> tuple[list[int], list[float]]:
        """The sampled tokens of a running row and their log-probs."""
        span = slice(self.prompt[row], self.known[row])
        return self.tokens[row, span].tolist(), self.logprobs[row, span].tolist()

    def remove(self, row: int, pool: KVPool, *, keep: bool = True) -> None:
        """End a running row; the last row moves to its place. keep: whether to cache its keys as a
        prefix."""
        if keep and self.length[row]:
            self._remember(row, pool)
        self.n -= 1
        last = self.n
        if row != last:
            pool.copy(last, row, int(self.length[last]))
            size = self.known[last]
            self.tokens[row, :size] = self.tokens[last, :size]
            self.logprobs[row, :size] = self.logprobs[last, :size]
            for column in self._columns:
                column[row] = column[last]
        lists: tuple[list[Any], ...] = (self.calls, self.spans, self.top_logprobs)
        for values in lists:
            values[row] = values[last]
            values.pop()
        self.length[last] = self.known[last] = 0

    def forget(self, policy: int | None = None) -> None:
        """Empty the idle rows of one policy, or of all."""
        gone = np.arange(len(self.policy)) >= self.limit
        if policy is not None:
            gone &= self.policy == policy
        self.length[gone] = self.known[gone] = self.used[gone] = 0

    def change_version(self, policy: int, old: int, new: int) -> None:
        """Called when a policy's weights have changed. Empties its idle rows; running rows record
        where the version begins, and recompute their keys."""
        self.forget(policy)
        for row in np.flatnonzero(self.policy[: self.n] == policy).tolist():
            sampled = int(self.known[row] - self.prompt[row])
            if sampled and old != new:
                before = self.spans[row] or [(0, old)]
                self.spans[row] = [span for span in before if span[0] < sampled] + [(sampled, new)]
            self.length[row] = 0

    def _remember(self, row: int, pool: KVPool) -> None:
        length, policy = int(self.length[row]), int(self.policy[row])
        idle = slice(self.limit, None)
        # Replace an idle row that is a prefix of the new one, else the least recently used row.
        within = self.shared(self.tokens[row, :length], policy)[idle] >= self.known[idle]
        target = self.limit + int(np.where(within, -1, self.used[idle]).argmin())
        pool.copy(row, target, length)
        self.tokens[target, :length] = self.tokens[row, :length]
        self.length[target] = self.known[target] = length
        self.policy[target] = policy
        self.clock += 1
        self.used[target] = self.clock
