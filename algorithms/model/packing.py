"""Packing: rows of one forward pass as a forest of tokens, under a token budget. `forward` computes
the packs.

A pack is a forest of rows as one sequence without padding. With `rows` nothing is shared between
rows; with `trie` a common prefix is one path, computed once, forward and backward. Rows are never
split. A row's last action and the tokens after it predict nothing and are left out.

In a forest equal prefixes are one path, and each distinct (prefix, token) is a node. Nodes are
numbered depth first, so a subtree is a range of numbers: "j is i or an ancestor of i" is
`j <= i < end[j]`, one number per node instead of a matrix.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from agentrl.algorithms.data.batch import TokenRow

Ids = NDArray[np.int64]
Packing = Literal["rows", "trie"]
MIN_PACK = 256  # tokens that a CPU multiplies about as fast as more of them
MAX_DUPLICATES = 1 / 8  # tokens of a batch that small packs may compute again


@dataclass(frozen=True, slots=True)
class Pack:
    """Rows of one forward pass, as one sequence of T tokens without padding, with n actions. A
    token shared by several rows is present once, a shared action once per row."""

    tokens: Tensor  # int64 [T], distinct tokens, depth first; below 0: see `Inputs`
    positions: Tensor  # int64 [T], depth in the branch
    end: Tensor  # int64 [T], key j is visible to query i iff j <= i < end[j]
    states: Tensor  # int64 [n], the packed token whose hidden state predicts each action
    actions: Tensor  # int64 [n], the predicted token
    temperature: Tensor  # float32 [n]
    index: Tensor  # int64 [n], index in the batch's token level
    observed_states: Tensor  # int64 [o], the packed token that predicts each observation
    observed: Tensor  # int64 [o], the predicted token
    observed_index: Tensor  # int64 [o], index in the batch's level of observations

    def with_observations(self) -> Pack:
        """With the observations after the actions, at temperature 1, as if they were sampled."""
        return replace(
            self,
            states=torch.cat((self.states, self.observed_states)),
            actions=torch.cat((self.actions, self.observed)),
            temperature=torch.cat((self.temperature, torch.ones(len(self.observed)))),
        )


def pack_rows(
    rows: Sequence[TokenRow],
    packing: Packing,
    token_budget: int,
    unit: Tensor | None = None,
    *,
    small: bool = False,
) -> list[Pack]:
    """Pack every row once, with at most `token_budget` tokens per pack unless one unit is longer:
    few packs for `rows`, the fewest duplicate tokens for `trie`.

    `Pack.index` refers to the rows' actions concatenated in row order, as in a batch. unit: int64
    [R], ids of rows that must be in one pack; default: each row is a unit. small: packs as small as
    `small_ranges` makes them."""
    sequences = [row.tokens[: int(row.actions[-1])].numpy() for row in rows]
    if packing == "trie":
        order, shared = depth_first(sequences)
    else:
        order = sorted(range(len(rows)), key=lambda i: len(sequences[i]))
        shared = np.zeros(len(rows), np.int64)
    ids = np.arange(len(rows)) if unit is None or not len(unit) else unit.numpy()
    order, shared = _unit_by_unit(order, shared, ids, sequences, packing)
    lengths = np.array([len(sequences[i]) for i in order], np.int64)
    first = np.flatnonzero(np.diff(ids[order], prepend=-1))  # first row of each unit in `order`
    new = np.add.reduceat(lengths - shared, first) if len(first) else lengths
    bounds = np.append(first, len(order))
    offsets, observed_offsets = (
        np.cumsum(np.array([0, *sizes], np.int64))
        for sizes in ([len(row.actions) for row in rows], [len(row.observed) for row in rows])
    )
    packs = []
    split = small_ranges if small else token_budget_ranges
    ranges = split(new + shared[first], shared[first], token_budget)
    for start, stop in ((bounds[a], bounds[b]) for a, b in ranges):
        chosen = order[start:stop]
        forest = build_forest([sequences[i] for i in chosen], shared[start:stop])
        chosen_rows = [rows[i] for i in chosen]
        before = [row.actions.numpy() - 1 for row in chosen_rows]
        states = [path[places] for path, places in zip(forest.paths, before, strict=True)]
        index = [np.arange(offsets[i], offsets[i + 1]) for i in chosen]
        packs.append(
            Pack(
                tokens=torch.from_numpy(forest.tokens),
                positions=torch.from_numpy(forest.depth),
                end=torch.from_numpy(forest.end),
                states=torch.from_numpy(np.concatenate(states)),
                actions=torch.cat([row.tokens[row.actions] for row in chosen_rows]),
                temperature=torch.cat([row.temperature for row in chosen_rows]),
                index=torch.from_numpy(np.concatenate(index)),
                observed_states=torch.cat(
                    [
                        torch.from_numpy(path)[row.observed - 1]
                        for path, row in zip(forest.paths, chosen_rows, strict=True)
                    ]
                ),
                observed=torch.cat([row.tokens[row.observed] for row in chosen_rows]),
                observed_index=torch.cat(
                    [torch.arange(observed_offsets[i], observed_offsets[i + 1]) for i in chosen]
                ),
            )
        )
    return packs


@dataclass(frozen=True, slots=True)
class Forest:
    """Trees of token sequences: nodes in depth-first order, and the path of each sequence."""

    tokens: Ids  # [T]
    depth: Ids  # [T], roots: 0
    end: Ids  # [T], past the last node of the subtree
    paths: list[Ids]  # node of each token of each sequence


def depth_first(sequences: Sequence[Ids]) -> tuple[list[int], Ids]:
    """An order in which sequences with a common prefix are adjacent, and the length of the prefix
    that each shares with the one before it (the first: 0), int64 [n]."""
    keys = [sequence.tobytes() for sequence in sequences]  # any total order of tokens will do
    order = sorted(range(len(keys)), key=keys.__getitem__)
    shared = np.zeros(len(order), np.int64)
    for k in range(1, len(order)):
        shared[k] = common_prefix(sequences[order[k - 1]], sequences[order[k]])
    return order, shared


def _unit_by_unit(
    order: list[int], shared: Ids, ids: Ids, sequences: Sequence[Ids], packing: Packing
) -> tuple[list[int], Ids]:
    """Reorder with the rows of each unit adjacent; returns the order and shared prefix lengths."""
    rank: dict[int, int] = {}
    for i in order:
        rank.setdefault(int(ids[i]), len(rank))
    grouped = sorted(order, key=lambda i: rank[int(ids[i])])
    if grouped == order or packing == "rows":
        return grouped, shared
    prefixes = [common_prefix(sequences[a], sequences[b]) for a, b in pairwise(grouped)]
    return grouped, np.array([0, *prefixes], np.int64)


def common_prefix(a: Ids, b: Ids) -> int:
    """Length of the common prefix of two sequences."""
    size = min(len(a), len(b))
    different = np.flatnonzero(a[:size] != b[:size])
    return int(different[0]) if len(different) else size


def token_budget_ranges(lengths: Ids, shared: Ids, budget: int) -> list[tuple[int, int]]:
    """Split sequences into ranges [start, stop) of at most `budget` distinct tokens, or of a single
    sequence, with the fewest duplicate tokens, and among these the fewest ranges.

    A range duplicates only the prefix that its first sequence shares with the one before it, so the
    cost of a cut depends only on its position: shortest path over positions, O(n) numpy calls."""
    n = len(lengths)
    before = np.concatenate(([0], np.cumsum(lengths - shared)))  # new tokens before each position
    offset = before[:-1] - shared  # tokens of range [i, j) = before[j] - offset[i]
    cost = np.zeros(n + 1, np.int64)  # minimal cost of splitting the first j sequences ...
    start = np.zeros(n + 1, np.int64)  # ... and the start of the last range
    penalty = shared * (n + 1) + 1  # fewest tokens first, then fewest ranges
    first = 0  # start of the widest range that ends at j; never moves back
    for j in range(1, n + 1):
        while first < j - 1 and before[j] - offset[first] > budget:
            first += 1
        candidates = cost[first:j] + penalty[first:j]
        start[j] = first + int(candidates.argmin())
        cost[j] = candidates[start[j] - first]
    ranges, stop = [], n
    while stop:
        ranges.append((int(start[stop]), stop))
        stop = ranges[-1][0]
    return ranges[::-1]


def small_ranges(lengths: Ids, shared: Ids, budget: int) -> list[tuple[int, int]]:
    """`token_budget_ranges` of the smallest budget that adds few duplicate tokens to those of
    `budget`: activations for a backward pass take the memory of the largest range."""
    widest = token_budget_ranges(lengths, shared, budget)
    tokens = int((lengths - shared).sum())
    limit = (1 + MAX_DUPLICATES) * (tokens + duplicates(widest, shared))
    size = MIN_PACK
    while size < budget:
        ranges = token_budget_ranges(lengths, shared, size)
        if tokens + duplicates(ranges, shared) <= limit:
            return ranges
        size += size // 2
    return widest


def duplicates(ranges: Sequence[tuple[int, int]], shared: Ids) -> int:
    """Tokens at the beginning of ranges that are computed in an earlier range, too."""
    return sum(int(shared[start]) for start, _ in ranges)


def build_forest(sequences: Sequence[Ids], shared: Ids) -> Forest:
    """Build the forest of sequences in depth-first order. shared[k]: length of the prefix that
    sequence k shares with the one before it (0: a new tree); ignored for the first sequence."""
    shared = np.where(np.arange(len(shared)), shared, 0)
    size = sum(map(len, sequences)) - int(shared.sum())
    tokens, depth = np.empty(size, np.int64), np.empty(size, np.int64)
    end = np.full(size, size, np.int64)
    paths: list[Ids] = []
    path, first = np.empty(0, np.int64), 0
    for sequence, k in zip(sequences, shared.tolist(), strict=True):
        stop = first + len(sequence) - k
        end[path[k:]] = first  # the rest of the previous path ends here
        tokens[first:stop], depth[first:stop] = sequence[k:], np.arange(k, len(sequence))
        path = np.concatenate((path[:k], np.arange(first, stop)))
        paths.append(path)
        first = stop
    return Forest(tokens, depth, end, paths)
