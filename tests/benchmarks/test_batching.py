"""What the batching benchmark counts, rather than times, holds on every machine."""

from __future__ import annotations

import pytest

from agentrl.algorithms.data.batch import TokenRow
from agentrl.algorithms.model.packing import Packing, pack_rows
from tests.benchmarks import batching


def forwarded(rows: list[TokenRow], how: Packing) -> int:
    return sum(len(pack.tokens) for pack in pack_rows(rows, how, batching.BUDGET))


# Tokens of a trie over those of another scheme, and over the distinct ones: splits cost little.
@pytest.mark.parametrize(
    ("name", "scheme", "most"),
    [("A", "rows", 0.76), ("B", "per-call", 0.06), ("C", "last-call", 0.31), ("D", "rows", 0.1)],
)
def test_a_trie_forwards_little_else_than_distinct_tokens(
    name: str, scheme: str, most: float
) -> None:
    group = batching.workloads()[name]
    rows = {s: [row for calls in group for row in m(calls)] for s, m in batching.MERGES.items()}
    trie = forwarded(rows["trie"], "trie")
    assert trie / forwarded(rows[scheme], "rows") <= most
    assert batching.distinct(rows["trie"]) <= trie <= 1.01 * batching.distinct(rows["trie"])


def test_the_last_call_rule_joins_uninterrupted_calls() -> None:
    linear, agents = (batching.workloads()[name][0] for name in "AC")
    assert [len(run) for run in batching.runs(linear)] == [10]
    assert [len(run) for run in batching.runs(agents)] == [1, 4] * 10
