"""Token sequences as a forest: equal prefixes are one path, each distinct (prefix, token) a node.

Nodes are numbered depth first. Then what a node is a prefix of, its subtree, is one range of
numbers, so "j is an ancestor of i, or i itself" is `j <= i < end[j]`: one number per node instead
of a matrix. Pure functions over arrays.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Ids = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Forest:
    """Nodes in depth-first order, and where the sequences it was grown from run through it."""

    tokens: Ids  # [T]
    depth: Ids  # [T], roots: 0
    end: Ids  # [T], past the last node of the subtree
    paths: list[Ids]  # node of each token of each sequence


def depth_first(sequences: Sequence[Ids]) -> tuple[list[int], Ids]:
    """An order in which sequences with a common prefix are neighbours, and int64 [n]: how many
    tokens each shares with the one before it in that order (the first: 0)."""
    keys = [sequence.tobytes() for sequence in sequences]  # any order of tokens will do
    order = sorted(range(len(keys)), key=keys.__getitem__)
    shared = np.zeros(len(order), np.int64)
    for k in range(1, len(order)):
        shared[k] = common_prefix(sequences[order[k - 1]], sequences[order[k]])
    return order, shared


def common_prefix(a: Ids, b: Ids) -> int:
    """How many tokens two sequences have in common from their start."""
    size = min(len(a), len(b))
    different = np.flatnonzero(a[:size] != b[:size])
    return int(different[0]) if len(different) else size


def token_budget_ranges(lengths: Ids, shared: Ids, budget: int) -> list[tuple[int, int]]:
    """Ranges [start, stop) of neighbours, each with at most `budget` distinct tokens or of one
    sequence alone, such that the fewest tokens are in more than one range, and then the fewest
    ranges.

    A range computes again what its first sequence shares with the one before it, and nothing else,
    so the cost of a cut depends on its place only: shortest path over the places, O(n) numpy calls.
    """
    n = len(lengths)
    before = np.concatenate(([0], np.cumsum(lengths - shared)))  # new tokens before each place
    alone = before[:-1] - shared  # tokens of range [i, j) = before[j] - alone[i]
    cost = np.zeros(n + 1, np.int64)  # of the best cuts of the first j sequences ...
    start = np.zeros(n + 1, np.int64)  # ... the last of which is here
    penalty = shared * (n + 1) + 1  # fewest tokens first, then fewest ranges
    first = 0  # the widest range that ends at j; moves only forward, as ranges only grow
    for j in range(1, n + 1):
        while first < j - 1 and before[j] - alone[first] > budget:
            first += 1
        candidates = cost[first:j] + penalty[first:j]
        start[j] = first + int(candidates.argmin())
        cost[j] = candidates[start[j] - first]
    ranges, stop = [], n
    while stop:
        ranges.append((int(start[stop]), stop))
        stop = ranges[-1][0]
    return ranges[::-1]


def build_forest(sequences: Sequence[Ids], shared: Ids) -> Forest:
    """The forest of sequences in depth-first order. `shared[k]`: tokens that sequence k has in
    common with the one before it and that are to be one path (0: a tree of its own). That of the
    first sequence does not count."""
    shared = np.where(np.arange(len(shared)), shared, 0)
    sizes = [len(sequence) - int(k) for sequence, k in zip(sequences, shared, strict=True)]
    end = np.full(sum(sizes), sum(sizes), np.int64)
    paths: list[Ids] = []
    path, size = np.empty(0, np.int64), 0
    for new, k in zip(sizes, shared.tolist(), strict=True):
        end[path[k:]] = size  # what does not go on ends here
        path = np.concatenate((path[:k], np.arange(size, size + new)))
        paths.append(path)
        size += new
    tails = [sequence[k:] for sequence, k in zip(sequences, shared.tolist(), strict=True)]
    depth = [np.arange(k, k + new) for k, new in zip(shared.tolist(), sizes, strict=True)]
    empty = np.empty(0, np.int64)
    return Forest(np.concatenate([empty, *tails]), np.concatenate([empty, *depth]), end, paths)
