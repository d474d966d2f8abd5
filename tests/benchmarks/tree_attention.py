"""Attention over a group's trie, forward and backward of one layer, computed in three ways.

tiles: as the package does. dense: one product under a mask of all pairs. segments: every branch
attends to a copy of its path's keys, with gradients by autograd. CPU milliseconds of one thread,
for the workloads of the batching benchmark at two lengths.

python -m tests.benchmarks.tree_attention --json
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from agentrl.algorithms.data.merge import merge
from agentrl.algorithms.model.attention import TreePlan, visible
from agentrl.algorithms.model.packing import Pack, pack_rows
from tests.benchmarks import batching

HEADS, KEY_HEADS, DIM = 8, 2, 64
SCALES = (10, 25)  # lengths are so many times shorter than at real sizes

Attend = Callable[[Tensor, Tensor, Tensor], Tensor]


def repeated(key: Tensor) -> Tensor:
    return key.repeat_interleave(HEADS // KEY_HEADS, dim=1)


def tiles(pack: Pack) -> Attend:
    plan = TreePlan(pack.end, pack.positions)
    return lambda q, k, v: plan.attend(q, k, v, None, None)


def dense(pack: Pack) -> Attend:
    every = slice(0, len(pack.end))
    hidden = ~visible(pack.end, pack.positions, every, every, None)
    mask = torch.zeros(hidden.shape).masked_fill_(hidden, float("-inf"))
    return lambda q, k, v: scaled_dot_product_attention(
        q, repeated(k), repeated(v), attn_mask=mask
    ).transpose(1, 2)


def segments(pack: Pack) -> Attend:
    number = torch.arange(len(pack.end))
    stops = [0, *((pack.end == number + 1).nonzero().flatten() + 1).tolist()]
    paths = [((number < stop) & (pack.end >= stop)).nonzero().flatten() for stop in stops[1:]]
    masks = [
        torch.ones(stop - start, len(path), dtype=torch.bool).tril_(len(path) - stop + start)
        for start, stop, path in zip(stops[:-1], stops[1:], paths, strict=True)
    ]

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        parts = [
            scaled_dot_product_attention(
                own, repeated(k[:, :, path]), repeated(v[:, :, path]), attn_mask=mask
            )
            for own, path, mask in zip(
                q.split([mask.shape[0] for mask in masks], dim=2), paths, masks, strict=True
            )
        ]
        return torch.cat(parts, dim=2).transpose(1, 2)

    return attend


def milliseconds(attend: Attend, size: int) -> float:
    inputs = [torch.randn(1, heads, size, DIM) for heads in (HEADS, KEY_HEADS, KEY_HEADS)]
    q, k, v = (tensor.requires_grad_() for tensor in inputs)
    gradient = torch.randn(1, size, HEADS, DIM)
    started = time.process_time()
    torch.autograd.grad(attend(q, k, v), (q, k, v), gradient)
    return (time.process_time() - started) * 1000


def measure(repeats: int) -> dict[str, float]:
    figures: dict[str, float] = {}
    for scale in SCALES:
        for name, group in batching.workloads(scale).items():
            pack = pack_rows([row for calls in group for row in merge(calls)], "trie", 4096)[0]
            ways = {"tiles": tiles(pack), "dense": dense(pack), "segments": segments(pack)}
            title = f"{name} / {scale}"
            figures[f"{title} tokens"] = size = len(pack.tokens)
            for way, attend in ways.items():
                figures[f"{title} {way}"] = min(milliseconds(attend, size) for _ in range(repeats))
    return figures


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--json", action="store_true", help="print one JSON object only")
    options = parser.parse_args()
    torch.set_num_threads(1)
    figures = measure(options.repeats)
    if options.json:
        print(json.dumps(figures))
        return
    for key, value in figures.items():
        print(f"{key:<24}{value:>12.4g}")


if __name__ == "__main__":
    main()
