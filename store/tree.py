"""The tree rule: a call hangs below the deepest earlier call that it continues, exactly.

Used twice per transition, over byte strings: its tokens (prompt and completion, int32), and its
chat (one JSON line per message). Linear conversations, sub-agents, best-of-n, compaction and
parallel branches all follow from the one rule, and T turns cost O(T) storage.
"""

from __future__ import annotations

from collections.abc import Iterable
from hashlib import blake2b
from itertools import islice
from typing import NamedTuple

Bytes = bytes | memoryview


class Node(NamedTuple):
    """What must be known of an earlier call to find those that continue it."""

    seq: int
    size: int  # bytes
    digest: bytes


def digest(data: Bytes) -> bytes:
    """128 bits: two different byte strings of one attempt never meet."""
    return blake2b(data, digest_size=16).digest()


def prefixes(data: Bytes, sizes: Iterable[int]) -> dict[int, bytes]:
    """Digest of `data[:size]` for every size that is not longer than it, in one pass."""
    view, state, done = memoryview(data), blake2b(digest_size=16), 0
    found: dict[int, bytes] = {}
    for size in sorted(set(sizes)):
        if size > len(view):
            break
        state.update(view[done:size])
        done = size
        found[size] = state.copy().digest()
    return found


def deepest(data: Bytes, nodes: Iterable[Node]) -> Node | None:
    """The first of `nodes` that is a prefix of `data`. They come longest first.

    Nodes are read as far as needed: in a linear conversation one, where branches mix ever more at
    a time, so that `data` is passed over a few times at most."""
    waiting, some = iter(nodes), 1
    while batch := list(islice(waiting, some)):
        found = prefixes(data, [node.size for node in batch])
        for node in batch:
            if found.get(node.size) == node.digest:
                return node
        some *= 8
    return None
