"""The attention function of all models of this package, controlled by a plan per forward pass.

The policy server attends from rows of unequal length to cached keys, the learner along the branches
of a forest, and both use one model object. So one function is registered with transformers under
`NAME`: a forward pass with `plan=` follows the plan, any other is ordinary SDPA.

In a forest in depth-first order (see `packing`) a node attends to its ancestors and itself. On the
CPU the nodes are cut into contiguous blocks. The queries of a block attend to its keys in one
product, causal or with a small mask. If the subtree of a key extends beyond its block, all its
later descendants are one range of queries, which attend to it in another product. So no key is
copied and no pair across branches is computed. The partial results of a query are combined by their
log-sum-exp, forward and backward (as in ring attention, arXiv 2310.01889). On a GPU it is one
FlexAttention kernel with a block mask.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cache
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, flex_attention
from torch.nn.functional import pad
from transformers import AttentionInterface
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import AttentionMaskInterface, sdpa_mask

from agentrl.core.errors import PolicyError

NAME = "agentrl"
UNUSED = torch.ones(1, 1, 1, 1, dtype=torch.bool)  # passed as mask, so that none is computed
# Arguments by which layers change attention scores; no plan supports them.
CHANGES_SCORES = ("softcap", "s_aux", "position_bias", "alibi")

KEY_BLOCK = 256  # keys that the policy server attends to in one product
NARROW_BLOCK = 64  # likewise in 16 bits, whose products read whole blocks

# Tokens. Adjacent short branches are computed in one product with a mask of at most this size:
# fewer products, at the price of some masked pairs. Also the size of tiles with a sliding window.
FLEX_BLOCK = 128
# Options of the forward kernel for heads of size 64 in 16 bits on an H100 or H200. torch 2.11's
# default options take twice as long.
HOPPER_64 = {
    "fwd_BLOCK_M": 128, "fwd_BLOCK_N": 64, "fwd_num_warps": 4, "fwd_num_stages": 3,
}  # fmt: skip
HIDDEN_SCORE = (
    torch.finfo(torch.float32).min / 2
)  # exp(HIDDEN_SCORE + score) is 0; -inf would make 0 / 0

_flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_flash_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward


class AttentionPlan(Protocol):
    """The attention pattern of one forward pass, for every layer."""

    def attend(
        self, query: Tensor, key: Tensor, value: Tensor, scale: float | None, window: int | None
    ) -> Tensor:
        """[1, heads, N, dim] queries -> [1, N, heads, value dim]. window: number of last positions,
        including the query's own, to attend to (None: all)."""


def incompatibility(model: torch.nn.Module) -> str | None:
    """The reason why this attention function cannot replace a model's own, as the predicate of a
    sentence about the model; None if it can."""
    network: Any = model
    config = network.config.get_text_config()
    layers = set(getattr(config, "layer_types", None) or ())
    if layers - {"full_attention", "sliding_attention"}:
        return f"has layers of type {min(layers - {'full_attention', 'sliding_attention'})!r}"
    if getattr(config, "attn_logit_softcapping", None):
        return "caps its attention scores"
    if not (network._supports_attention_backend and network._supports_sdpa):
        return "has an attention of its own"
    for rope in _ropes(config):
        # the rotary frequencies of every call would depend on the longest call
        if rope.get("rope_type") in ("dynamic", "longrope"):
            return f"has {rope['rope_type']!r} rotary positions"
    return None


def context_length(model: torch.nn.Module) -> int | None:
    """The context length of a model, or None if its configuration has none. If the configuration
    names the original length of an extended context, its factor is applied, because many
    configurations leave `max_position_embeddings` at the original length."""
    network: Any = model
    config = network.config.get_text_config()
    most: int | None = getattr(config, "max_position_embeddings", None)
    if most is None:
        return None
    for rope in _ropes(config):
        original = rope.get("original_max_position_embeddings")
        if rope.get("rope_type") == "yarn":  # as transformers' own, whose default it is
            original = original or most
        if original and (factor := rope.get("factor")):
            most = max(most, int(factor * original))
    return most


def longrope_threshold(model: torch.nn.Module) -> int | None:
    """The sequence length above which a longrope model uses other rotary frequencies for all
    positions, or None for other models."""
    network: Any = model
    config = network.config.get_text_config()
    ropes = _ropes(config)
    if not any(rope.get("rope_type") == "longrope" for rope in ropes):
        return None
    names = [rope.get("original_max_position_embeddings") for rope in ropes]
    top_level = getattr(config, "original_max_position_embeddings", None)
    return next((length for length in (*names, top_level) if length), context_length(model))


def _ropes(config: Any) -> list[dict[str, Any]]:
    """The parameters of rotary positions; layers may have different ones."""
    rope = getattr(config, "rope_parameters", None) or {}
    nested = [parameters for parameters in rope.values() if isinstance(parameters, dict)]
    return [rope, *nested]


def whole_blocks(context: int, dtype: torch.dtype) -> int:
    """Round a context length up to whole blocks of keys."""
    block = NARROW_BLOCK if dtype.itemsize == 2 else KEY_BLOCK
    return -(-context // block) * block


def install(model: torch.nn.Module) -> None:
    """Make a model without an `incompatibility` use `attention`."""
    network: Any = model
    if network.config._attn_implementation != NAME:
        network.set_attn_implementation(NAME)


def attention(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    plan: AttentionPlan | None = None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """The function for transformers: [B, heads, N, dim] queries -> [B, N, heads, value dim].

    A plan supports branches and sliding windows only. A layer that asks for another pattern by an
    argument raises PolicyError; `forward.prove` detects layers that do so in their masks."""
    if plan is None:
        output: tuple[Tensor, None] = sdpa_attention_forward(
            module, query, key, value, attention_mask, scaling=scaling, **kwargs
        )
        return output
    if any(kwargs.get(name) is not None for name in CHANGES_SCORES):
        changed = next(name for name in CHANGES_SCORES if kwargs.get(name) is not None)
        raise PolicyError(f"its layers change attention scores by {changed!r}")
    if attention_mask is not None and attention_mask.shape != UNUSED.shape:
        raise PolicyError("its layers compute attention masks of their own")
    # Contiguous, as transformers' own functions return it: some models take a view of it.
    return plan.attend(query, key, value, scaling, sliding_window).contiguous(), None


AttentionInterface.register(NAME, attention)
AttentionMaskInterface.register(NAME, sdpa_mask)


@dataclass(frozen=True, slots=True)
class Tile:
    """A range of queries against a range of keys."""

    queries: slice
    keys: slice
    causal: bool = False  # queries and keys are the same range, with a causal mask
    mask: Tensor | None = None  # [queries, keys], added to the scores


@dataclass(frozen=True, slots=True)
class TreePlan:
    """The plan of a forward pass over a forest (see `packing`): columns of its nodes on the CPU."""

    end: Tensor  # int64 [T], past the last node of the subtree
    depth: Tensor  # int64 [T]
    tiles: dict[tuple[int | None, torch.dtype], list[Tile]] = field(default_factory=dict)
    masks: dict[tuple[int | None, torch.device], BlockMask] = field(default_factory=dict)

    def attend(
        self, query: Tensor, key: Tensor, value: Tensor, scale: float | None, window: int | None
    ) -> Tensor:
        """See `AttentionPlan`; [1, key heads, T, dim] keys and values."""
        if window is not None and window > int(self.depth.max()):
            window = None
        if query.is_cuda:
            return self.flex(query, key, value, scale, window)
        dim = value.shape[-1]
        # The kernel needs equal head sizes, and assumes that the last axis is contiguous.
        value = pad(value, (0, query.shape[-1] - dim))
        query, key, value = (
            x if x.stride(-1) == 1 else x.contiguous() for x in (query, key, value)
        )
        dtype = torch.promote_types(query.dtype, torch.float32)
        if (window, dtype) not in self.tiles:
            self.tiles[window, dtype] = tiles(self.end, self.depth, window, dtype)
        output: Tensor = _TreeAttention.apply(query, key, value, self.tiles[window, dtype], scale)  # type: ignore[no-untyped-call]
        return output[..., :dim]

    def flex(
        self, query: Tensor, key: Tensor, value: Tensor, scale: float | None, window: int | None
    ) -> Tensor:
        """`attend` as one kernel, for heads of size 16 or more; the tests run it uncompiled."""
        device, size = query.device, len(self.end)
        if (window, device) not in self.masks:
            end, depth = self.end.to(device), self.depth.to(device)

            def seen(batch: Tensor, head: Tensor, q: Tensor, k: Tensor) -> Tensor:
                near = (k <= q) & (q < end[k])
                return near if window is None else near & (depth[q] - depth[k] < window)

            self.masks[window, device] = create_block_mask(seen, None, None, size, size, device)
        # Keys and values are copied for each query head: the backward kernel has one program for
        # each block and head of keys, and the few of a shared prompt would run alone at its end.
        shared = query.shape[1] // key.shape[1]
        key, value = (x.repeat_interleave(shared, 1) if shared > 1 else x for x in (key, value))
        mask = self.masks[window, device]
        output: Tensor = _compiled_flex()(
            query, key, value, block_mask=mask, scale=scale, kernel_options=kernel_options(query)
        )
        return output.transpose(1, 2)


def kernel_options(query: Tensor) -> dict[str, Any]:
    """Options of the FlexAttention kernel for [1, heads, T, dim] queries that torch does not infer,
    or chooses badly. ROWS_GUARANTEED_SAFE is not one of them: a query sees itself, but not always a
    key of the first block it reads."""
    # For varying lengths torch compiles a kernel that compares each index with the length.
    options: dict[str, Any] = {"IS_DIVISIBLE": True} if query.shape[2] % FLEX_BLOCK == 0 else {}
    hopper = query.is_cuda and torch.cuda.get_device_capability(query.device) == (9, 0)
    if hopper and query.shape[3] == 64 and query.dtype.itemsize == 2:
        options |= HOPPER_64
    return options


@cache
def _compiled_flex() -> Any:
    return torch.compile(flex_attention)


def tiles(end: Tensor, depth: Tensor, window: int | None, dtype: torch.dtype) -> list[Tile]:
    """Tiles that contain each pair (query, key) of nodes that attend exactly once, with masks of
    `dtype`. The diagonal blocks come first and contain every query."""

    def mask(queries: slice, keys: slice) -> Tensor:
        attended = visible(end, depth, queries, keys, window)
        return torch.zeros(attended.shape, dtype=dtype).masked_fill_(~attended, HIDDEN_SCORE)

    blocks = _blocks(end, window)
    result = []
    for start, stop in blocks:
        block = slice(start, stop)
        one_branch = window is None and int(end[start:stop].min()) >= stop
        result.append(Tile(block, block, one_branch, None if one_branch else mask(block, block)))
    for start, stop in blocks:
        for keys, last in _open(end, start, stop):
            if window is None:
                result.append(Tile(slice(stop, last), keys))
                continue
            for first in range(stop, last, FLEX_BLOCK):
                queries = slice(first, min(first + FLEX_BLOCK, last))
                if int(depth[queries].min()) - int(depth[keys].max()) < window:
                    result.append(Tile(queries, keys, mask=mask(queries, keys)))
    return result


def _blocks(end: Tensor, window: int | None) -> list[tuple[int, int]]:
    """Ranges of nodes that end at the end of a branch and are one branch or at most FLEX_BLOCK
    nodes. With a window, branches are also cut after FLEX_BLOCK nodes."""
    leaves = end == torch.arange(1, len(end) + 1)
    blocks: list[tuple[int, int]] = []
    start = previous = 0
    for stop in end[leaves].tolist():
        if stop - start > FLEX_BLOCK and previous > start:
            blocks.append((start, previous))
            start = previous
        previous = stop
    blocks.append((start, previous))
    if window is None:
        return blocks
    return [
        (first, min(first + FLEX_BLOCK, stop))
        for start, stop in blocks
        for first in range(start, stop, FLEX_BLOCK)
    ]


def _open(end: Tensor, start: int, stop: int) -> Iterator[tuple[slice, int]]:
    """Yield runs of a block's nodes with the same descendants after the block, and where these
    descendants end."""
    values, counts = torch.unique_consecutive(end[start:stop], return_counts=True)
    for last, size in zip(values.tolist(), counts.tolist(), strict=True):
        if last > stop:
            yield slice(start, start + size), last
        start += size


def visible(end: Tensor, depth: Tensor, queries: slice, keys: slice, window: int | None) -> Tensor:
    """Attention mask of nodes, bool [queries, keys]."""
    number = torch.arange(len(end))
    q, k = number[queries, None], number[None, keys]
    attended = (k <= q) & (q < end[None, keys])
    if window is not None:
        attended &= depth[queries, None] - depth[None, keys] < window
    return attended


class _TreeAttention(torch.autograd.Function):
    """[1, heads, T, dim] -> [1, T, heads, dim]."""

    @staticmethod
    def forward(
        ctx: Any, query: Tensor, key: Tensor, value: Tensor, tiles: list[Tile], scale: float | None
    ) -> Tensor:
        # In 16 bits the kernel's backward pass takes twice as long as in float32.
        q, k, v = _by_key_head(*map(_wide, (query, key, value)))
        wide, lse = _flash_tiles(q, k, v, tiles, scale)
        out = wide.to(query.dtype)
        ctx.save_for_backward(query, key, value, out, lse)
        ctx.tiles, ctx.scale = tiles, scale
        return out.flatten(0, 1).transpose(0, 1)[None]

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, narrow, lse = ctx.saved_tensors
        q, k, v = _by_key_head(*map(_wide, (query, key, value)))
        g = _wide(gradients[0][0].contiguous()).transpose(0, 1).view(q.shape)
        out = _wide(narrow)
        dq = torch.zeros_like(q, dtype=lse.dtype)
        dk, dv = (torch.zeros_like(x[0], dtype=lse.dtype) for x in (key, value))
        for tile in ctx.tiles:
            i, j = tile.queries, tile.keys
            gq, gk, gv = _flash_backward(
                g[:, :, i], q[:, :, i], k[:, :, j], v[:, :, j], out[:, :, i], lse[:, :, i],
                0.0, tile.causal, attn_mask=tile.mask, scale=ctx.scale,
            )  # fmt: skip
            dq[:, :, i] += gq
            dk[:, j] += gk.sum(1)
            dv[:, j] += gv.sum(1)
        dq = dq.flatten(0, 1)[None].to(query.dtype)
        return dq, dk[None].to(key.dtype), dv[None].to(value.dtype), None, None


def _wide(x: Tensor) -> Tensor:
    return x.to(torch.promote_types(x.dtype, torch.float32))


def _by_key_head(query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Views [key heads, query heads per key head, T, dim], without repeating keys and values."""
    heads, shared = query.shape[1], key.shape[1]
    size = (shared, heads // shared)
    k, v = (x[0][:, None].expand(-1, size[1], -1, -1) for x in (key, value))
    return query[0].view(*size, *query.shape[2:]), k, v


def _flash_tiles(
    q: Tensor, k: Tensor, v: Tensor, tiles: list[Tile], scale: float | None
) -> tuple[Tensor, Tensor]:
    """Outputs [.., .., T, dim] and log-sum-exps [.., .., T]."""
    out = lse = torch.empty(0)
    for tile in tiles:
        i, j = tile.queries, tile.keys
        part, weight = _flash(
            q[:, :, i], k[:, :, j], v[:, :, j], 0.0, tile.causal, attn_mask=tile.mask, scale=scale
        )
        if not lse.numel():
            out = torch.empty(q.shape, dtype=weight.dtype)
            lse = torch.empty(q.shape[:-1], dtype=weight.dtype)
        if i == j:
            out[:, :, i], lse[:, :, i] = part, weight
            continue
        before = lse[:, :, i]
        total = torch.logaddexp(before, weight)
        out[:, :, i] *= (before - total).exp_()[..., None]
        out[:, :, i] += part * (weight - total).exp_()[..., None]
        lse[:, :, i] = total
    return out, lse
