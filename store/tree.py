"""The tree rule: a call hangs below the deepest earlier call that it continues, exactly.

Used twice per transition, over byte strings: its tokens (prompt and completion, int32), and its
chat (one JSON line per message). Linear conversations, sub-agents, best-of-n, compaction and
parallel branches all follow from the one rule, and T turns cost O(T) storage.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from hashlib import blake2b
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


def deepest(data: Bytes, nodes: Sequence[Node]) -> list[Node]:
    """The longest non-empty nodes that are a prefix of `data`, in the order given.

    More than one where samples of the same prompt came out equal."""
    found = prefixes(data, [node.size for node in nodes])
    fits = [node for node in nodes if node.size and found.get(node.size) == node.digest]
    longest = max((node.size for node in fits), default=0)
    return [node for node in fits if node.size == longest]
